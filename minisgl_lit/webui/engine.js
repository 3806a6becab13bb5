// The engine, five times a second, while somebody looks: figures, batches, pages, and the shape of the tree.

import {$, element, number} from './dom.js'
import {Locked, ask, askMore, call, events, offers} from './server.js'
import {about, chosen, refresh, theBase, theModel, theState} from './models.js'

const WINDOW = 12   // seconds of batches
let batches = [], counts = [], before = null   // what was computed; what the engine has counted, a second long
let looking = new AbortController(), wake = () => {}, locked = false
let pageSize = 0
let met = null   // the model of which was told last
let cold = false   // whether all that is waited for is that it is loaded

export const sizeOfPage = () => pageSize

// what to do when the key is missing, and with what is known of the model that is chosen
export async function watch({onLocked, onModel}) {
  for (;;) {
    const mine = looking = new AbortController()
    cold = false
    let brief = 'not connected'
    try {
      await refresh()
      if (theState() === 'loaded') {
        await introduce(onModel)
        if (!offers.more) return
        for await (const now of events(await call(about('live'), null, mine.signal))) show(now)
      } else {
        brief = theState()
        if (met !== theModel()) onModel({chat_template: (await ask('api/show', {model: theBase()})).template})
      }
      met = theModel()
    } catch (e) {
      if (e instanceof Locked) { locked = true; onLocked() }
    }
    document.body.classList.remove('on')
    $('live').classList.add('lost')
    $('brief').textContent = locked ? 'locked' : mine.signal.aborted ? 'connecting' : brief
    $('speed').textContent = ''
    cold = !locked && !document.hidden && ['not loaded', 'failed'].includes(brief)
    if (document.hidden || !mine.signal.aborted) await pause(locked || document.hidden ? 0 : cold ? 20_000 : 2000)
  }
}

// another model is chosen: what is known is of its engine no more
export function turn() {
  batches = counts = []
  before = null
  for (const o of $('live').querySelectorAll('dd')) o.textContent = '–'
  looking.abort()
  wake()
}

// something has happened: perhaps the model is loaded
export const look = () => { if (cold) wake() }

export function unlocked() {
  locked = false
  wake()
}

const pause = ms => new Promise(done => { wake = done; if (ms) setTimeout(done, ms) })

document.addEventListener('visibilitychange', () => document.hidden ? looking.abort() : wake())

async function introduce(onModel) {
  const info = await askMore(about('get_server_info'))
  if (!info) return plain(onModel)
  pageSize = info.page_size ?? 1
  onModel({...await ask(about('get_model_info')), ...await ask(about('tokenizer_info'))})
}

// a server of OpenAI's API alone: what it does not offer is hidden
async function plain(onModel) {
  offers.more = false
  document.body.classList.add('plain', 'on')
  $('brief').textContent = 'settings'
  $('tab-settings').click()
  onModel({model_path: chosen().root})
}

function note(now) {
  if (before && now.steps < before.steps) batches = counts = []   // another engine
  const last = batches.at(-1)?.step ?? 0
  for (const [step, kind, rows, prompt, cached, made, guessed, start, seconds] of now.batches)
    if (step > last) batches.push({step, kind, rows, prompt, cached, made: made - guessed, guessed, start, seconds: Math.max(seconds, 1e-6)})
  batches = batches.filter(o => o.start + o.seconds > now.time - WINDOW)
  counts = [...counts.filter(o => o.time > now.time - 1.1), now]
  before = now
}

function lately(name) {   // so many a second
  const [first] = counts
  return (before[name] - first[name]) / Math.max(before.time - first.time, .1)
}

function show(now) {
  note(now)
  const {total, held, evictable, free} = now.pages, inTree = now.pages.protected + evictable, rate = lately('generated_tokens')
  const texts = {running: number(now.running), waiting: number(now.waiting), rate: number(rate), total: `${number(total)} of ${pageSize} tokens each`,
    held: number(held), protected: number(now.pages.protected), evictable: number(evictable), free: number(free),
    tree: `${number(inTree)} pages, ${number(inTree * pageSize)} tokens`, hits: `${number(now.hit_rate * 100)} %`,
    evicted: number(now.evicted_pages), retracted: number(now.retracted), steps: `${number(lately('steps'))} steps/s`,
    brief: now.running ? `${number(now.running)} running` : now.waiting ? `${number(now.waiting)} waiting` : 'engine idle', speed: now.running && rate ? `, ${number(rate)} tok/s` : ''}
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text
  for (const part of $('pages').children) part.style.flexGrow = now.pages[part.className]
  document.body.classList.add('on')
  $('live').classList.remove('lost')
  if (!$('side').hidden) repaint()
}

export function repaint() {
  if (!before) return
  paint()
  drawTree(before.tree ?? [])
}

// a bar for each batch in two lanes, each with its own scale; height is tokens a second, so the area is its tokens
function paint() {
  const canvas = $('timeline'), scale = devicePixelRatio, width = canvas.clientWidth, lane = canvas.clientHeight / 2
  const fit = {width: Math.round(width * scale), height: Math.round(2 * lane * scale)}
  if (canvas.width !== fit.width || canvas.height !== fit.height) Object.assign(canvas, fit)
  const c = canvas.getContext('2d'), style = getComputedStyle(document.body), color = name => style.getPropertyValue(`--${name}`)
  const x = time => width * (1 - (before.time - time) / WINDOW)
  c.setTransform(scale, 0, 0, scale, 0, 0)
  c.clearRect(0, 0, width, 2 * lane)
  $('guessed').hidden = !batches.some(o => o.guessed)
  c.font = `11px ${color('sans')}`
  for (const [ground, names] of [[lane, ['prompt', 'cached']], [2 * lane, ['made', 'guessed']]]) {
    const rates = batches.map(o => names.reduce((n, name) => n + o[name], 0) / o.seconds).sort((a, b) => a - b)
    const top = roundUp(Math.max(20, rates[Math.floor(rates.length * .99)] ?? 0))   // one hasty batch shall not flatten all others
    for (const o of batches) {
      let y = ground
      for (const name of names) {
        const left = x(o.start), whole = x(o.start + o.seconds) - left, wide = whole > 3 ? whole - 1 : whole
        const tall = (lane - 18) * o[name] / Math.max(o.seconds * top, names.reduce((n, part) => n + o[part], 0))
        y -= tall
        c.fillStyle = c.strokeStyle = color({made: 'accent', guessed: 'guessed'}[name] ?? 'prompt')
        if (name !== 'cached') c.fillRect(left, y, wide, tall)
        else if (tall > 1 && wide > 1) c.strokeRect(left + .5, y + .5, Math.max(wide - 1, .5), tall - 1)
      }
    }
    c.fillStyle = color('line')
    c.fillRect(0, ground - 1, width, 1)
    c.fillStyle = color('soft')
    c.fillText(`${number(top)} tok/s`, 0, ground - lane + 14)
  }
}

function roundUp(n) {
  const ten = 10 ** Math.floor(Math.log10(n))
  return ten * [1, 2, 5, 10].find(o => o * ten >= n)
}

// Rows of [parent, pages, locked, hits, unseen]: sizes only, since a tree holds what other callers have said, too.
// A node is as wide as the pages of it and below; what follows stands under it.
function drawTree(rows) {
  const nodes = rows.map(([parent, pages, locked, hits, unseen]) => ({parent, pages, locked, hits, unseen, below: [], weight: 0}))
  for (const o of nodes) if (o.parent !== null) nodes[o.parent].below.push(o)
  for (const o of nodes.toReversed()) o.weight = Math.max(o.pages, o.below.reduce((n, child) => n + child.weight, 0)) || 1
  const draw = o => {
    const bar = element('i', o.locked ? 'protected' : 'evictable')
    bar.title = `${number(o.pages)} pages, matched by ${number(o.hits)} requests${o.locked ? ', locked' : ''}${o.unseen ? `; ${o.unseen} more follow` : ''}`
    const made = element('div', 'node', ...(o.pages ? [bar] : []), element('div', 'below', ...o.below.map(draw)))
    made.style.flexGrow = o.weight
    return made
  }
  $('branches').replaceChildren(...(nodes.length ? [draw(nodes[0])] : []))
}
