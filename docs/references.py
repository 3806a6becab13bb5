"""Names in signatures. For each `int` and `str` Sphinx would go through all names of the book, to see whether
one ends so; here it does that only where one does."""
from functools import cached_property

from sphinx.domains.python import PythonDomain

class Domain(PythonDomain):
    @cached_property
    def _ends(self):   # asked for when all pages have been read
        return {o.rpartition(".")[2] for o in self.objects}

    def find_obj(self, env, modname, classname, name, type, searchmode=0):
        if searchmode and name.removesuffix("()").rpartition(".")[2] not in self._ends: return []
        return super().find_obj(env, modname, classname, name, type, searchmode)

def setup(app):
    app.add_domain(Domain, override=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
