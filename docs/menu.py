"""The theme's menu, made once for all pages of a folder, whose links are the same; the page that is open is
marked in it afterwards. The theme makes the menu anew for each page: half of the time that writing took."""
import posixpath, re
from functools import cache
from furo.navigation import get_navigation_tree
from sphinx.environment.adapters.toctree import global_toctree_for_doc

def marked(tag):
    "A tag on the way to the open page, as the theme writes it"
    if tag.startswith("<ul"): return '<ul class="current">'
    if tag.startswith("<li"): return re.sub(r"toctree-l\d+", r"\g<0> current", tag)
    if tag.startswith("<input"): return tag.replace(' class="', ' checked="" class="', 1)
    return '<a class="current reference internal" href="#">'

class Menu:
    "`html` is a menu in which no page is open"
    def __init__(self, html):
        self.parts = re.split(r"(</?(?:ul|li|a|input)\b[^>]*>)", html)
        self.ways = {}   # address of a page: the places of the tags on the way to it, its own last
        way, inside = [], []
        for i, part in enumerate(self.parts):
            if part.startswith(("<ul", "<li")): inside.append(len(way))
            if part.startswith(("<ul", "<li", "<input")): way.append(i)
            elif part.startswith("<a"):
                after = [i + 4] if self.parts[i + 4].startswith("<input") else []
                self.ways[re.search(r'href="([^"]*)"', part)[1]] = [*way, i, *after]
            elif part in ("</ul>", "</li>"): del way[inside.pop():]

    def open_at(self, address):
        "The menu with the page at `address` open in it, if it is there"
        parts, way = list(self.parts), self.ways.get(address, [])
        entries = [i for i in way if parts[i].startswith("<li")]
        if entries: parts[entries[-1]] = parts[entries[-1]].replace('">', ' current-page">')
        for i in way: parts[i] = marked(parts[i])
        return "".join(parts)

@cache
def menu(app, folder):
    tree = global_toctree_for_doc(app.env, posixpath.join(folder, "no page"), app.builder, tags=app.tags,
                                  titles_only=True, maxdepth=-1)
    return Menu(get_navigation_tree(app.builder.render_partial(tree)["fragment"]))

def leave_out_tree(app, page, template, context, doctree):
    "The theme asks for `toctree`, of which it makes the menu; without one it makes an empty one"
    context.pop("toctree", None)

def set_menu(app, page, template, context, doctree):
    folder = posixpath.dirname(page)
    context["furo_navigation_tree"] = menu(app, folder).open_at(
        app.builder.get_relative_uri(posixpath.join(folder, "no page"), page))

def setup(app):
    app.connect("html-page-context", leave_out_tree, priority=1)
    app.connect("html-page-context", set_menu, priority=999)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
