// A conversation is a tree of messages, of which one path is shown. Plain data, as it is kept and exported.

const FORMAT = 'minisgl_lit conversation'
const LONGEST_TITLE = 60   // characters that a conversation takes from its first question
const ROLES = ['user', 'assistant']

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10)

export const newConversation = () => ({format: FORMAT, id: newId(), title: '', changed: Date.now(), shown: null, messages: []})

const find = (talk, id) => talk.messages.find(o => o.id === id)

export const children = (talk, id) => talk.messages.filter(o => o.parent === id)

export const siblings = (talk, message) => children(talk, message.parent)

// from the first message to this one; without one, to the last that is shown
export function path(talk, end = talk.shown) {
  const found = []
  for (let o = find(talk, end); o; o = find(talk, o.parent)) found.unshift(o)
  return found
}

// fields: at least a role, a text and a parent, which is null for the first
export function add(talk, fields) {
  const message = {id: newId(), ...fields}
  talk.messages.push(message)
  talk.shown = message.id
  return message
}

// show the branch of this message, down to what was last said in it
export function select(talk, message) {
  let end = message
  for (let next; (next = children(talk, end.id).at(-1)); ) end = next
  talk.shown = end.id
}

// a message goes with all that follows from it; what stands beside it is shown instead
export function remove(talk, message) {
  const gone = new Set([message.id])
  for (const o of talk.messages) if (gone.has(o.parent)) gone.add(o.id)   // parents come first
  const left = siblings(talk, message).filter(o => o !== message)
  talk.messages = talk.messages.filter(o => !gone.has(o.id))
  if (!gone.has(talk.shown)) return
  if (left.length) select(talk, left.at(-1))
  else talk.shown = message.parent
}

export function nameOf(talk) {
  if (talk.title) return talk.title
  const [line] = (talk.messages[0]?.text ?? '').trim().split('\n')
  return line.length > LONGEST_TITLE ? line.slice(0, LONGEST_TITLE - 1) + '…' : line || 'New chat'
}

// whether each of these words stands somewhere in it
export function matches(talk, words) {
  const all = [talk.title, ...talk.messages.map(o => o.text)].join('\n').toLowerCase()
  return words.toLowerCase().split(/\s+/).every(o => all.includes(o))
}

// the shown path, for people
export function asMarkdown(talk) {
  const said = path(talk).map(o => `## ${o.role === 'user' ? 'Question' : 'Answer'}\n\n${o.text.trim()}\n`)
  return [`# ${nameOf(talk)}\n`, ...said].join('\n')
}

export const asJson = talks => JSON.stringify(talks, null, 1)

// ---- what was exported comes back, checked: a file may be anything

function checked(given) {
  if (given?.format !== FORMAT || !Array.isArray(given.messages)) throw new Error('This is no conversation that was exported here.')
  const talk = {...newConversation(), title: String(given.title ?? ''), changed: Number(given.changed) || Date.now()}
  const known = new Set()
  for (const o of given.messages) {
    const sound = o && typeof o.id === 'string' && !known.has(o.id) && ROLES.includes(o.role) && typeof o.text === 'string'
    if (!sound || (o.parent !== null && !known.has(o.parent))) throw new Error('A message in this file is not sound.')
    known.add(o.id)
    talk.messages.push(plain(o))
  }
  talk.shown = known.has(given.shown) ? given.shown : talk.messages.at(-1)?.id ?? null
  return talk
}

// the fields that the page would show, each of the kind that it expects
function plain({id, parent, role, text, thought, reason, settings, system, model, usage}) {
  const message = {id, parent, role, text}
  if (typeof thought === 'string') message.thought = thought
  if (typeof system === 'string') message.system = system
  if (typeof model === 'string') message.model = model
  if (role === 'assistant') message.reason = typeof reason === 'string' ? reason : 'broken'
  if (settings && typeof settings === 'object') message.settings = settings
  if (Number.isInteger(usage?.prompt_tokens) && Number.isInteger(usage?.completion_tokens)) message.usage = usage
  return message
}

// the conversations in an exported file; an Error with a sentence if it holds none
export function readConversations(text) {
  let given
  try { given = JSON.parse(text) } catch { throw new Error('This file is no JSON.') }
  return [given].flat().map(checked)
}
