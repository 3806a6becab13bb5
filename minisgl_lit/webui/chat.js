// The conversation that is shown: asking, answers as they come, and all that can be done with a message.

import {$, asked, element} from './dom.js'
import {Locked, ask, call, events, offers} from './server.js'
import {add, children, nameOf, newConversation, newId, path, remove, select, siblings} from './conversation.js'
import {keep, recall, remember} from './store.js'
import {theModel} from './models.js'
import {systemPrompt, two, wishes} from './settings.js'
import {Turn} from './turn.js'

const SAVE = 1000   // milliseconds between two savings of an answer that grows
const WATCHING = 500   // milliseconds between two looks at the way of an answer that is being written
const LOADING = 1500   // and from a comment that a model is being loaded to the first such look, unless another comes
const STOPPING = 2000   // and until a server that does not end an answer is left alone

let talk = newConversation(), turns = new Map(), editing = null
let runs = []   // answers that are being written: {message, talk, controller, id}
let told = {onLocked() {}, onSaved() {}, onNews() {}}

export const current = () => talk

export function start(callbacks) { told = callbacks }

// ---- what is seen

const log = () => $('log')

function follow(act) {   // stay at the end, unless the reader has scrolled up
  const atEnd = log().scrollHeight - log().scrollTop - log().clientHeight < 60
  act()
  if (atEnd) log().scrollTop = log().scrollHeight
}

export function draw() {
  turns = new Map()
  const shown = path(talk)
  $('said').replaceChildren(...shown.map(view))
  $('empty').hidden = shown.length > 0
  $('title').hidden = shown.length === 0
  $('name').textContent = nameOf(talk)
  busy()
}

function view(message) {
  const beside = pairOf(message)
  if (beside.length < 2) return turn(message)
  return element('div', 'pair', ...beside.map((o, i) => turn(o, {beside: `Answer ${'AB'[i]}`, choose: o !== message})))
}

// the answers that were asked for together with this one
const pairOf = message => message.pair ? siblings(talk, message).filter(o => o.pair === message.pair) : [message]

function turn(message, more = {}) {
  const all = siblings(talk, message), made = new Turn(message, acts, {i: all.indexOf(message), of: all.length, ...more})
  turns.set(message.id, made)
  return made.element
}

function busy() {
  const mine = runs.some(o => o.talk === talk)
  $('send').hidden = mine
  $('stop').hidden = !mine
  log().setAttribute('aria-busy', String(runs.some(o => o.talk === talk && !isLoading(o))))   // what it says is read out when it is whole
  takeFocus()
  told.onNews()
}

// what had the focus may be gone; then it is the message's, but for fingers, who would get a keyboard
function takeFocus() {
  const held = document.activeElement, gone = held === document.body || !held.checkVisibility()
  if (gone && !matchMedia('(pointer: coarse)').matches) $('text').focus({preventScroll: true})
}

export function fail(error) {
  if (error instanceof Locked) told.onLocked()
  $('trouble').textContent = error.message
}

async function save(which = talk) {
  which.changed = Date.now()
  try { await keep(which) } catch (e) { fail(e) }
  told.onSaved(which)
}

// ---- one conversation after another; what is half typed stays with its own

export function show(which) {
  talk = which
  editing = null
  remember('open', talk.id)
  $('trouble').textContent = ''
  restoreDraft()
  draw()
  log().scrollTop = log().scrollHeight
}

export function draft() {
  const text = $('text').value, drafts = recall('drafts', {})
  if (text) drafts[talk.id] = {text, editing: editing?.id ?? null}
  else delete drafts[talk.id]
  remember('drafts', drafts)
}

function restoreDraft() {
  const kept = recall('drafts', {})[talk.id]
  edit(talk.messages.find(o => o.id === kept?.editing) ?? null, kept?.text ?? '')
}

function edit(message, text) {
  editing = message
  $('editing').hidden = !message
  $('text').value = text
}

export function cancelEdit() {
  edit(null, '')
  draft()
}

export function editLast() {
  const last = path(talk).findLast(o => o.role === 'user')
  if (last) acts.edit(last)
}

// ---- asking

export async function send(text = $('text').value.trim()) {
  if (!text || runs.some(o => o.talk === talk)) return
  $('trouble').textContent = ''
  const mine = talk, question = add(mine, {role: 'user', text, parent: editing ? editing.parent : mine.shown})
  edit(null, '')
  draft()
  await answerTo(question)
  if (children(mine, question.id).length) return
  remove(mine, question)   // nothing was said: give the question back
  save(mine)
  if (mine !== talk) return
  $('text').value ||= text
  draft()
  draw()
}

// an answer, or two beside each other
async function answerTo(question) {
  const mine = talk, sets = two() ? [0, 1] : [0], pair = two() ? {pair: newId()} : {}
  const made = sets.map(() => add(mine, {role: 'assistant', text: '', parent: question.id, ...pair}))
  mine.shown = made[0].id
  draw()
  save(mine)
  log().scrollTop = log().scrollHeight
  await Promise.all(sets.map(set => answer(mine, made[set], set)))
}

// the messages that a message answers, as the server wants them
function said(of, message) {
  const {system} = message
  return [...(system ? [{role: 'system', content: system}] : []), ...path(of, message.parent).map(o => ({role: o.role, content: o.text}))]
}

async function answer(of, message, set) {
  const run = {message, talk: of, controller: new AbortController(), id: `chatcmpl-${newId()}`, started: performance.now(), saved: performance.now(), loading: -LOADING, drawn: 0, begun: false}
  runs.push(run)
  run.watch = setInterval(watchWay, WATCHING, run)
  delete message.reason
  redraw(run)
  busy()
  try {
    Object.assign(message, {settings: wishes(set), system: systemPrompt(set), model: theModel()})
    const messages = said(of, message), begun = message.text !== ''
    if (begun) messages.push({role: 'assistant', content: message.text})
    const body = {rid: run.id, model: message.model, messages, stream: true, stream_options: {include_usage: true}, ...message.settings, ...(begun && {continue_final_message: true})}
    const response = await call('v1/chat/completions', body, run.controller.signal)
    for await (const event of events(response, said => wait(run, said))) take(run, event)
    if (!message.reason) throw new Error('The answer broke off.')
  } catch (e) {
    message.reason = e.name === 'AbortError' ? 'stopped' : 'broken'
    if (message.reason === 'broken' && of === talk) fail(e)
  }
  await end(run)
}

// an event of the stream; the answer is drawn when the browser draws
function take(run, event) {
  const {message} = run, [choice] = event.choices, {content = '', reasoning_content: thought = ''} = choice?.delta ?? {}
  if (!run.begun) { Object.assign(run, {begun: true, loading: -LOADING}); busy() }
  message.usage = event.usage ?? message.usage
  message.text += content ?? ''
  if (thought) message.thought = (message.thought ?? '') + thought
  if (message.thought && content && !message.seconds) message.seconds = (performance.now() - run.started) / 1e3
  for (const o of choice?.logprobs?.content ?? []) noteToken(message, o, !!thought)
  if (choice?.finish_reason) message.reason = choice.finish_reason
  run.drawn ||= requestAnimationFrame(() => { run.drawn = 0; redraw(run) })
  if (performance.now() - run.saved < SAVE) return
  run.saved = performance.now()
  save(run.talk)
}

// its model is being loaded, as the server says about once a second
function wait(run, said) {
  run.loading = performance.now()
  busy()
  follow(() => turns.get(run.message.id)?.say(said + ' …'))
}

const isLoading = run => performance.now() - run.loading < LOADING

function noteToken(message, {token, logprob, top_logprobs}, thought) {
  message.tokens ??= []
  message.tokens.push({text: token, logprob, thought, top: top_logprobs.map(o => ({text: o.token, logprob: o.logprob}))})
}

function redraw({message}) {
  follow(() => turns.get(message.id)?.draw())
}

// how far its request is, in the queue, too; one look at a time, since a browser has few connections, which Stop needs, too
async function watchWay(run) {
  const {id, message, started} = run, seen = turns.get(message.id)
  if (!offers.more || !seen || run.looks || isLoading(run) || document.hidden) return
  run.looks = true
  const way = await ask(`requests/${id}`).catch(() => null)
  run.looks = false
  if (way && !message.reason) follow(() => seen.watch(way, (performance.now() - started) / 1e3))
}

async function end(run) {
  const {message} = run
  clearInterval(run.watch)
  if (offers.more && run.begun) message.way = await ask(`requests/${run.id}`).catch(() => null)
  cancelAnimationFrame(run.drawn)
  runs = runs.filter(o => o !== run)
  const empty = !message.text && !message.thought && message.reason === 'broken'
  if (empty) remove(run.talk, message)
  if (run.talk === talk) {
    if (empty) draw()
    else redraw(run)
    busy()
  }
  await save(run.talk)
}

// The server is told to end the answer, so that it can say what it has cost.
export function stop() {
  for (const run of runs) {
    const {id, controller, message, talk: of} = run
    if (of !== talk) continue
    if (!offers.more || isLoading(run)) { controller.abort(); continue }
    call('abort_request', {rid: id}).catch(() => controller.abort())
    setTimeout(() => { if (!message.reason) controller.abort() }, STOPPING)
  }
}

// ---- what can be done with a message

const acts = {
  messages: message => said(talk, message),

  edit(message) {
    edit(message, message.text)
    draft()
    $('text').focus()
  },

  async again(message) {
    $('trouble').textContent = ''
    await answerTo({id: message.parent})
  },

  async proceed(message) {
    $('trouble').textContent = ''
    await answer(talk, message, 0)
  },

  // another answer, which begins with this text
  async branch(message, text) {
    const made = add(talk, {role: 'assistant', text, parent: message.parent})
    draw()
    await answer(talk, made, 0)
  },

  choose(message) {
    select(talk, message)
    draw()
    save()
  },

  turn(message, by) {
    const all = siblings(talk, message), next = all[all.indexOf(message) + by]
    acts.choose(next)
    turns.get(next.id).focusTurns(by)
  },

  async remove(message) {
    const follows = children(talk, message.id).length ? ' and all that follows from it' : ''
    if (await asked(`Delete this message${follows}?`, {yes: 'Delete'}) === null) return
    remove(talk, message)
    draw()
    save()
  }}

export const again = () => {
  const last = path(talk).at(-1)
  if (last?.role === 'assistant' && last.reason) acts.again(last)
}

// ---- a reload in the middle of an answer: the newest state is written at once, and taken up when the page is opened again

addEventListener('pagehide', () => {
  const open = [...new Set(runs.map(o => o.talk))]
  if (open.length) remember('unfinished', open.map(o => ({...o, messages: o.messages.map(({tokens, ...rest}) => rest)})))
})

export async function takeUp() {
  for (const one of recall('unfinished', [])) {
    for (const o of one.messages) if (o.role === 'assistant') o.reason ??= 'broken'
    await keep(one)
  }
  remember('unfinished', null)
}
