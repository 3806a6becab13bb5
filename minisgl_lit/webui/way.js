// What an answer took, as the server has measured it: the line below it, its way through queue, chunks and steps, its prompt and cache.

import {button, duration, element, number} from './dom.js'
import {ask} from './server.js'
import {sizeOfPage} from './engine.js'
import {about} from './models.js'

const ENDS = {length: 'ended at the token limit', abort: 'stopped', stopped: 'stopped', broken: 'broke off'}

// tokens a second between the first token and the last, by the server's clock
function rate(way) {
  const seconds = way.end - way.first_token
  return way.output_tokens > 1 && seconds > 0 ? (way.output_tokens - 1) / seconds : null
}

export function bill({usage, way, reason, model}) {
  const parts = model ? [model] : []
  if (usage) {
    const {reasoning_tokens: thought, accepted_prediction_tokens: guessed} = usage.completion_tokens_details ?? {}, cached = usage.prompt_tokens_details?.cached_tokens
    parts.push(`${number(usage.completion_tokens)} tokens` + (guessed ? `, ${number(guessed)} of them guessed` : '') + (thought ? `, ${number(thought)} of thinking` : ''))
    if (way?.end && rate(way)) parts.push(`${number(rate(way))} tok/s`)
    parts.push(`prompt of ${number(usage.prompt_tokens)}` + (cached ? `, ${number(cached)} cached` : ''))
  }
  if (way?.first_token) parts.push(`first after ${duration(way.first_token)}`)
  if (ENDS[reason]) parts.push(ENDS[reason] + (reason === 'abort' ? cost(way) : reason === 'stopped' ? ' before its first token' : ''))
  return parts.map(o => o.replaceAll(' ', '\u00a0')).join(' · ')
}

// what a stopped answer has cost: the engine's time, and the pages that it held
function cost(way) {
  if (!way?.end) return ''
  const pages = Math.ceil((way.prompt_tokens + way.output_tokens) / Math.max(sizeOfPage(), 1))
  return `; it cost ${duration(way.end - way.queued)} of the engine, ${number(way.prompt_tokens - way.cached_tokens + way.output_tokens)} tokens computed, ${number(pages)} pages`
}

// ---- the way, drawn: as long as it took

// as far as it is: the server tells no end yet, so what lasts ends now
export function wayNow(way, seconds) {
  const sofar = {...way, queued: way.queued ?? seconds, end: Math.max(seconds, way.first_token ?? 0)}
  return [drawing(sofar), element('p', 'bill', stations(sofar).map(o => `${o.title} ${o.text}`).join(' · '))]
}

export function wayView(message, messages) {
  const {way, settings} = message, parts = []
  if (way?.end) parts.push(drawing(way), element('ol', 'stations', ...stations(way).map(o => element('li', o.name, element('b', '', o.title), ` ${o.text}`))))
  else parts.push(element('p', 'note', 'The server knows nothing of this answer any more.'))
  const given = Object.entries(settings ?? {}).filter(([name]) => !name.endsWith('logprobs')).map(([name, value]) => `${name} ${typeof value === 'string' ? value : JSON.stringify(value)}`)
  parts.push(element('p', 'note', given.length ? `Asked with ${given.join(', ')}.` : 'Asked as the model has it.'), promptPart(message, messages))
  return element('div', 'way', ...parts)
}

function stations(way) {
  const [first, last] = [way.chunks[0], way.chunks.at(-1)]
  const computed = way.first_token ? way.prompt_tokens - way.cached_tokens : way.chunks.reduce((n, [, tokens]) => n + tokens, 0)
  const sizes = way.chunks.map(([, tokens]) => number(tokens)).join(' + ')
  const found = []
  found.push({name: 'queue', title: 'Queue', text: duration(way.queued), seconds: way.queued})
  if (first) found.push({name: 'prompt', title: 'Prompt', seconds: (way.first_token ?? way.end) - way.queued,
    text: `${duration((way.first_token ?? way.end) - way.queued)} for ${number(computed)} of ${number(way.prompt_tokens)} tokens` +
      `${way.cached_tokens ? ` (${number(way.cached_tokens)} came from the cache)` : ''}, in ` +
      (way.chunks.length > 1 ? `${number(way.chunks.length)} chunks of ${sizes}, steps ${number(first[0])} to ${number(last[0])}` : `step ${number(first[0])}`)})
  if (way.first_token) found.push({name: 'made', title: 'Answer', seconds: way.end - way.first_token,
    text: `${duration(way.end - way.first_token)} for ${number(way.output_tokens)} tokens` + (way.last_step === null ? '' : `, up to step ${number(way.last_step)}`)})
  if (way.retracted) found.push({name: 'back', title: 'Retracted', text: `${number(way.retracted)} times, to make room`, seconds: 0})
  return found
}

function drawing(way) {
  const bars = stations(way).filter(o => o.seconds > 0).flatMap(o => o.name === 'prompt' && way.chunks.length > 1
    ? way.chunks.map(([, , , seconds]) => bar(o, seconds)) : [bar(o, o.seconds)])
  return element('div', 'bars', ...bars)
}

function bar({name, title}, seconds) {
  const made = element('i', name)
  made.style.flexGrow = seconds * 1e6   // shares below 1 in sum would leave room
  made.title = `${title}: ${duration(seconds)}`
  return made
}

// ---- the prompt as the model has read it, with what came from the cache

function promptPart(message, messages) {
  const place = element('div', ''), show = button('Show the prompt and what came from the cache', async () => {
    try { place.replaceChildren(await prompt(message, messages)) }
    catch (e) { place.textContent = e.message }
  }, 'small')
  place.append(show)
  return place
}

async function prompt(message, messages) {
  const {reasoning_effort} = message.settings ?? {}
  const {tokens} = await ask(about('tokenize', message.model), {messages, ...(reasoning_effort && {reasoning_effort})}), n = message.usage?.prompt_tokens_details?.cached_tokens ?? 0
  const {text: [cached, rest]} = await ask(about('detokenize', message.model), {tokens: [tokens.slice(0, n), tokens.slice(n)], skip_special_tokens: false})
  const told = element('p', 'note', n ? `${number(n)} tokens came from the cache: they are marked.` : 'Nothing of it came from the cache.')
  const text = element('pre', 'prompt-text', ...(n ? [element('mark', '', cached)] : []), rest)
  Object.assign(text, {tabIndex: 0, role: 'region', ariaLabel: 'The prompt'})
  return element('div', '', told, text)
}
