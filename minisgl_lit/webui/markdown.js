// What a model writes, as elements. Its HTML stays text; what is made of its Markdown is sanitised all the same.

import {Marked} from './vendor/marked.js'
import DOMPurify from './vendor/purify.js'
import hljs from './vendor/highlight.js'
import {copyButton, element} from './dom.js'

const escaped = text => text.replace(/[&<>"']/g, o => `&#${o.charCodeAt(0)};`)

// $…$ and \(…\) in a line, $$…$$ and \[…\] on lines of their own; the formula is drawn once it is in the page
const INLINE = /^(?:\$\$([^$\n]+?)\$\$|\$(?![\s$])((?:\\.|[^$\\\n])*?[^\s\\])\$(?!\d)|\\\(([^\n]+?)\\\))/
const BLOCK = /^(?:\$\$\s*\n?([^]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/
const place = (tag, tex) => `<${tag} class="math">${escaped(tex)}</${tag}>`
const maths = [
  {name: 'formula', level: 'inline', start: src => at(src, /\$|\\\(/), tokenizer: src => token('formula', INLINE.exec(src)),
   renderer: ({tex}) => place('span', tex)},
  {name: 'display', level: 'block', start: src => at(src, /(?:^|\n)(?:\$\$|\\\[)/), tokenizer: src => token('display', BLOCK.exec(src)),
   renderer: ({tex}) => place('div', tex)}]

function at(src, pattern) {
  const i = src.search(pattern)
  return i < 0 ? undefined : i
}

function token(type, found) {
  return found ? {type, raw: found[0], tex: found.slice(1).find(o => o !== undefined).trim()} : undefined
}

const renderer = {
  html: ({text}) => escaped(text),
  image: ({text, href}) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,   // the page loads nothing from elsewhere
  code({text, lang}) {
    const language = hljs.getLanguage(lang?.split(/\s/)[0] ?? '') ? lang.split(/\s/)[0] : null
    const inside = language ? hljs.highlight(text, {language}).value : escaped(text)
    return `<pre data-language="${escaped(lang ?? '')}"><code>${inside}</code></pre>`
  }}
const marked = new Marked({gfm: true, renderer, extensions: maths})

const ALLOWED = {
  ALLOWED_TAGS: ['a', 'b', 'blockquote', 'br', 'code', 'del', 'div', 'em', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6', 'hr', 'input', 'li', 'ol', 'p', 'pre', 'span',
    'strong', 'table', 'tbody', 'td', 'th', 'thead', 'tr', 'ul'],
  ALLOWED_ATTR: ['align', 'checked', 'class', 'data-language', 'disabled', 'href', 'start', 'title', 'type'],
  ADD_URI_SAFE_ATTR: ['align', 'checked', 'data-language', 'disabled', 'start', 'type'],   // the others may hold addresses: of these kinds
  ALLOW_DATA_ATTR: false, ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, RETURN_DOM_FRAGMENT: true}

const elements = html => DOMPurify.sanitize(html, ALLOWED)

// Text as elements; what cannot be read as Markdown, such as ten thousand quotes in each other, is shown as it is.
export function render(text, into) {
  try { renderBlocks(text, into) } catch { into.replaceChildren(element('div', 'block plain', text)) }
}

// One element for each block. While an answer grows, only blocks that have changed are made anew.
function renderBlocks(text, into) {
  const tokens = marked.lexer(text), blocks = tokens.filter(o => o.type !== 'space')
  blocks.forEach(({raw}, i) => {
    if (into.children[i]?.source === raw) return
    const block = element('div', 'block', elements(marked.parser(Object.assign([blocks[i]], {links: tokens.links})).trim()))
    block.source = raw
    finish(block)
    if (into.children[i]) into.children[i].replaceWith(block)
    else into.append(block)
  })
  while (into.children.length > blocks.length) into.lastChild.remove()
}

// what only elements can have
function finish(block) {
  for (const link of block.querySelectorAll('a')) Object.assign(link, {target: '_blank', rel: 'noopener noreferrer nofollow'})
  for (const box of block.querySelectorAll('input')) Object.assign(box, {type: 'checkbox', disabled: true, ariaLabel: box.checked ? 'done' : 'to do'})
  for (const table of block.querySelectorAll('table')) table.replaceWith(frame('table', table.cloneNode(true)))
  for (const code of block.querySelectorAll('pre')) withHead(code)
  for (const tex of block.querySelectorAll('.math')) draw(tex)
}

// a box of its own, which can be scrolled, by keys too
function frame(name, inside) {
  const made = element('div', `scrolls ${name}`, inside)
  Object.assign(made, {tabIndex: 0, role: 'region', ariaLabel: name})
  return made
}

function withHead(code) {
  const head = element('div', 'code-head', element('span', '', code.dataset.language || 'text'), copyButton(() => code.textContent))
  const box = element('div', 'code')
  Object.assign(code, {tabIndex: 0, role: 'region', ariaLabel: 'code'})
  code.replaceWith(box)
  box.append(head, code)
}

let katex = null   // asked for when the first formula comes: it is the largest of the libraries

async function draw(place) {
  const tex = place.textContent, displayMode = place.tagName === 'DIV'
  place.title = tex
  katex ??= import('./vendor/katex.js').then(() => globalThis.katex)
  try { (await katex).render(tex, place, {displayMode, output: 'mathml', throwOnError: true, trust: false, maxExpand: 200, maxSize: 20, strict: 'ignore'}) }
  catch { place.textContent = tex }   // an unfinished or unknown formula stays as it was written
}
