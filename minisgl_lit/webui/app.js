// A chat with the model, and a look at the scheduler. Nothing is built: this file is what runs.
const $ = id => document.getElementById(id)
const number = (n, digits = 0) => n.toLocaleString('en', {maximumFractionDigits: digits})
const theKey = () => sessionStorage.getItem('key') ?? ''

// ---- the server: a call, and events of a stream; what goes wrong is an Error with a sentence

class Locked extends Error {}

async function call(path, body, signal) {
  const headers = {}
  if (body) headers['content-type'] = 'application/json'
  if (theKey()) headers.authorization = `Bearer ${theKey()}`
  const response = await fetch(path, {method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body), signal})
    .catch(lost('The server cannot be reached.'))
  if (response.ok) return response
  const told = await response.json().catch(() => null)
  throw new (response.status === 401 ? Locked : Error)(told?.error?.message ?? `The server answered with status ${response.status}.`)
}

function lost(sentence) {
  return e => { throw e.name === 'AbortError' ? e : new Error(sentence) }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let rest = ''; ;) {
    const {value, done} = await reader.read().catch(lost('The connection was lost.'))
    if (done) return
    const parts = (rest + value).split('\n\n')
    rest = parts.pop()
    for (const data of parts.map(o => o.slice('data: '.length)).filter(o => o !== '[DONE]')) {
      const event = JSON.parse(data)
      if (event.error) throw new Error(event.error.message)
      yield event
    }
  }
}

// ---- the chat

const history = []   // what has been said, as the server wants it
let answering = null  // ends the answer that is being written

function element(tag, name, ...inside) {
  const made = document.createElement(tag)
  if (name) made.className = name
  made.append(...inside)
  return made
}

// text with ```blocks```, `code` and **bold** as elements; never as HTML
function formatted(text) {
  return text.split(/(```[^]*?(?:```|$))/).flatMap((part, i) => i % 2
    ? element('pre', '', element('code', '', part.replace(/^```.*\n?|```$/g, '')))
    : part.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((bit, j) => j % 2 === 0 ? bit
      : bit[0] === '`' ? element('code', '', bit.slice(1, -1)) : element('b', '', bit.slice(2, -2))))
}

function addTurn(role, text) {
  const turn = element('div', `turn ${role}`, element('div', 'said', text))
  $('empty').hidden = true
  $('log').append(turn)
  return turn
}

// what a model has thought before its answer, folded; the function is told what there is so far
function thoughts(place, started) {
  const summary = element('summary', ''), text = element('div', ''), folded = element('details', 'thought', summary, text)
  return (thought, answer) => {
    if (!thought) return
    if (!folded.isConnected) place.before(folded)
    text.textContent = thought
    if (!answer) summary.textContent = 'Thinking …'
    else if (!folded.dataset.done) summary.textContent = folded.dataset.done = `Thought for ${number((performance.now() - started) / 1e3, 1)} s`
  }
}

function follow(act) {   // stay at the end, unless the reader has scrolled up
  const log = $('log'), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60
  act()
  if (atEnd) log.scrollTop = log.scrollHeight
}

function wishes() {
  const given = {}
  for (const field of document.querySelectorAll('#wishes input')) {
    if (field.validity.badInput) throw new Error(`${field.name} must be a number.`)
    if (field.value) given[field.name] = Number(field.value)
  }
  return given
}

function busy(controller) {
  answering = controller
  $('send').hidden = !!controller
  $('stop').hidden = !controller
  $('log').classList.toggle('busy', !!controller)
  $('log').setAttribute('aria-busy', String(!!controller))
}

// what the answer cost, as far as is known
function bill(reason, usage, started, first, ended) {
  const parts = []
  if (usage) {
    const {prompt_tokens, completion_tokens, prompt_tokens_details} = usage, cached = prompt_tokens_details?.cached_tokens
    const thought = usage.completion_tokens_details?.reasoning_tokens
    parts.push(`${number(completion_tokens)} tokens` + (thought ? `, ${number(thought)} of thinking` : ''))
    if (ended > first && completion_tokens > 1) parts.push(`${number((completion_tokens - 1) / (ended - first) * 1e3)} tok/s`)
    parts.push(`prompt of ${number(prompt_tokens)}` + (cached ? `, ${number(cached)} cached` : ''))
  }
  if (first) parts.push(`first after ${number(first - started)} ms`)
  if (reason === 'length') parts.push('ended at the token limit')
  if (reason === 'stopped') parts.push('stopped')
  return parts.map(o => o.replaceAll(' ', '\u00a0')).join(' · ')
}

async function send() {
  const text = $('text').value.trim()
  if (!text || answering) return
  $('trouble').textContent = ''
  const system = $('system').value.trim(), said = {role: 'user', content: text}
  const messages = [...(system ? [{role: 'system', content: system}] : []), ...history, said]
  busy(new AbortController())
  const mine = answering, question = addTurn('user', text), turn = addTurn('assistant', '')
  const place = turn.firstChild, started = performance.now()
  let answer = '', thought = '', reason = null, usage = null, first = 0, drawn = 0
  const fold = thoughts(place, started)
  const draw = () => { drawn = 0; follow(() => { fold(thought, answer); place.replaceChildren(...formatted(answer)) }) }
  $('text').value = ''
  $('log').scrollTop = $('log').scrollHeight
  try {
    const body = {messages, stream: true, stream_options: {include_usage: true}, ...wishes()}
    for await (const event of events(await call('v1/chat/completions', body, mine.signal))) {
      usage = event.usage ?? usage
      const [choice] = event.choices
      answer += choice?.delta.content ?? ''
      thought += choice?.delta.reasoning_content ?? ''
      reason = choice?.finish_reason ?? reason
      if (answer || thought) first ||= performance.now()
      drawn ||= requestAnimationFrame(draw)
    }
    if (!reason) throw new Error('The answer broke off.')
  } catch (e) {
    if (e.name === 'AbortError') reason = 'stopped'
    else fail(e)
  }
  cancelAnimationFrame(drawn)
  if (answering !== mine) return   // a new chat has begun
  draw()
  if (answer) history.push(said, {role: 'assistant', content: answer})
  if (answer || reason) follow(() => turn.append(element('p', 'bill', bill(reason, usage, started, first, performance.now()))))
  else {   // nothing was said: give the question back
    question.remove()
    turn.remove()
    $('text').value ||= text
    $('empty').hidden = history.length > 0
  }
  busy(null)
}

function fail(error) {
  if (error instanceof Locked) unlock()
  $('trouble').textContent = error.message
}

function reset() {
  answering?.abort()
  busy(null)
  history.length = 0
  for (const turn of document.querySelectorAll('.turn')) turn.remove()
  $('empty').hidden = false
  $('trouble').textContent = ''
  $('text').focus()
}

$('ask').addEventListener('submit', e => { e.preventDefault(); send() })
$('text').addEventListener('keydown', e => {
  if (e.key !== 'Enter' || e.shiftKey || e.isComposing) return
  e.preventDefault()
  send()
})
$('stop').addEventListener('click', () => { answering?.abort(); $('text').focus() })
document.addEventListener('keydown', e => { if (e.key === 'Escape') answering?.abort() })
$('reset').addEventListener('click', reset)
for (const o of document.querySelectorAll('#empty button')) o.addEventListener('click', () => { $('text').value = o.textContent; send() })

// ---- the engine, five times a second, while somebody looks

const WINDOW = 12   // seconds
let batches = [], counts = [], before = null, pageSize = 0   // what was computed; what the engine has counted, a second long

function note(now) {
  if (before && now.steps < before.steps) batches = counts = []   // another engine
  const last = batches.at(-1)?.step ?? 0
  for (const [step, kind, rows, prompt, cached, made, start, seconds] of now.batches)
    if (step > last) batches.push({step, kind, rows, prompt, cached, made, start, seconds: Math.max(seconds, 1e-6)})
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
    brief: now.running || now.waiting ? `${number(now.running)} running` : 'engine idle', speed: rate ? `, ${number(rate)} tok/s` : ''}
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text
  for (const part of $('pages').children) part.style.flexGrow = now.pages[part.className]
  document.body.classList.add('on')
  $('live').classList.remove('lost')
  if (!$('side').hidden) paint()
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
  c.font = `11px ${color('sans')}`
  for (const [ground, names] of [[lane, ['prompt', 'cached']], [2 * lane, ['made']]]) {
    const rates = batches.map(o => names.reduce((n, name) => n + o[name], 0) / o.seconds).sort((a, b) => a - b)
    const top = roundUp(Math.max(20, rates[Math.floor(rates.length * .99)] ?? 0))   // one hasty batch shall not flatten all others
    for (const o of batches) {
      let y = ground
      for (const name of names) {
        const left = x(o.start), whole = x(o.start + o.seconds) - left, wide = whole > 3 ? whole - 1 : whole
        const tall = (lane - 18) * o[name] / Math.max(o.seconds * top, names.reduce((n, part) => n + o[part], 0))
        y -= tall
        c.fillStyle = c.strokeStyle = color(name === 'made' ? 'accent' : 'prompt')
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

let looking = new AbortController(), wake = () => {}, locked = false
const pause = ms => new Promise(done => { wake = done; if (ms) setTimeout(done, ms) })

async function introduce() {
  pageSize = (await (await call('get_server_info')).json()).page_size ?? 1
  $('model').textContent = (await (await call('get_model_info')).json()).served_model_name
}

async function watch() {
  for (;;) {
    looking = new AbortController()
    try {
      await introduce()
      for await (const now of events(await call('live', null, looking.signal))) show(now)
    } catch (e) {
      if (e instanceof Locked) unlock()
    }
    document.body.classList.remove('on')
    $('live').classList.add('lost')
    $('brief').textContent = locked ? 'locked' : 'not connected'
    $('speed').textContent = ''
    await pause(locked || document.hidden ? 0 : 2000)
  }
}

document.addEventListener('visibilitychange', () => document.hidden ? looking.abort() : wake())

// ---- what stands beside the chat

const wide = () => matchMedia('(min-width: 56.01rem)').matches   // room for both: as in style.css

function open(wanted) {
  $('side').hidden = !wanted
  $('look').setAttribute('aria-expanded', String(wanted))
  if (wanted && before) paint()
}

function unlock() {
  locked = true
  open(true)
  $('key-part').hidden = false
  if (theKey()) $('key-note').textContent = 'That is not the key of this server.'
  $('key').focus()
}

$('look').addEventListener('click', () => open($('side').hidden))
$('key-part').addEventListener('submit', e => {
  e.preventDefault()
  sessionStorage.setItem('key', $('key').value.trim())
  locked = false
  $('key-part').hidden = true
  $('trouble').textContent = ''
  open(wide())
  $('text').focus()
  wake()
})
open(wide())
watch()
