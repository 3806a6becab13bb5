// The list of conversations: found, opened, named, exported, imported, deleted.

import {$, asked, button, download, element} from './dom.js'
import {asJson, asMarkdown, matches, nameOf, newConversation, readConversations} from './conversation.js'
import {conversations, forget, keep, recall} from './store.js'
import {current, draw, fail, show, takeUp} from './chat.js'

let all = []   // as they are kept, newest first

export async function load() {
  await takeUp()
  all = (await conversations()).sort((a, b) => b.changed - a.changed)
  for (const o of all.flatMap(o => o.messages)) if (o.role === 'assistant') o.reason ??= 'broken'   // the browser ended meanwhile
  const id = recall('open', null)
  show(all.find(o => o.id === id) ?? {...newConversation(), ...(id && {id})})
  list()
}

// what was saved stands first
export function saved(talk) {
  if (talk.messages.length && !all.includes(talk)) all.push(talk)
  all.sort((a, b) => b.changed - a.changed)
  list()
}

export function list() {
  const words = $('search').value.trim(), found = all.filter(o => !words || matches(o, words))
  $('found').replaceChildren(...found.map(item))
  $('none').hidden = found.length > 0
  $('none').textContent = words ? 'No conversation has these words.' : 'What you ask is kept here, in this browser alone.'
  $('export-all').disabled = !all.length
}

function item(talk) {
  const made = button(nameOf(talk), () => { show(talk); list(); told() })
  if (talk === current()) made.setAttribute('aria-current', 'true')
  made.title = new Date(talk.changed).toLocaleString()
  return element('li', '', made)
}

let told = () => {}   // what to do when one was chosen

export function start(onChosen) {
  told = onChosen
  $('search').addEventListener('input', list)
  $('rename').addEventListener('click', rename)
  $('export-markdown').addEventListener('click', () => download(`${fileName()}.md`, asMarkdown(current()), 'text/markdown'))
  $('export-json').addEventListener('click', () => download(`${fileName()}.json`, asJson([current()]), 'application/json'))
  $('export-all').addEventListener('click', () => download('conversations.json', asJson(all), 'application/json'))
  $('delete').addEventListener('click', drop)
  $('import').addEventListener('click', () => $('file').click())
  $('file').addEventListener('change', take)
}

const fileName = () => nameOf(current()).replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').toLowerCase() || 'chat'

export function begin() {
  show(newConversation())
  list()
}

async function rename() {
  const title = await asked('Name of this conversation', {value: nameOf(current()), yes: 'Rename'})
  if (title === null) return
  current().title = title
  await keep(current())
  draw()
  list()
}

async function drop() {
  const talk = current()
  if (await asked(`Delete “${nameOf(talk)}”, with all its messages?`, {yes: 'Delete'}) === null) return
  await forget(talk.id)
  all = all.filter(o => o !== talk)
  begin()
}

async function take() {
  const [file] = $('file').files
  $('file').value = ''
  if (!file) return
  try {
    const found = readConversations(await file.text())
    for (const talk of found) await keep(talk)
    all = [...found, ...all]
    if (found.length) show(found[0])
    list()
  } catch (e) { fail(e) }
}
