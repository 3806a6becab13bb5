// The server: a call, and events of a stream. What goes wrong is an Error with a sentence.

export class Locked extends Error {}
class Missing extends Error {}

const KINDS = {401: Locked, 404: Missing}

// whether the server tells more than OpenAI's API does: of its engine, and of the way of an answer
export const offers = {more: true}

export const theKey = () => sessionStorage.getItem('key') ?? ''

export async function call(path, body, signal) {
  const headers = {}
  if (body) headers['content-type'] = 'application/json'
  if (theKey()) headers.authorization = `Bearer ${theKey()}`
  const response = await fetch(path, {method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body), signal})
    .catch(lost('The server cannot be reached.'))
  if (response.ok) return response
  const told = await response.json().catch(() => null)
  throw new (KINDS[response.status] ?? Error)(told?.error?.message ?? `The server answered with status ${response.status}.`)
}

export const ask = async (path, body) => (await call(path, body)).json()

// what a server that has only OpenAI's API does not know: null
export const askMore = (path, body) => ask(path, body).catch(e => { if (e instanceof Missing) return null; throw e })

function lost(sentence) {
  return e => { throw e.name === 'AbortError' ? e : new Error(sentence) }
}

// onComment: hears of what is told between events, as while a model is loaded
export async function* events(response, onComment = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let rest = ''; ;) {
    const {value, done} = await reader.read().catch(lost('The connection was lost.'))
    if (done) return
    const parts = (rest + value).split('\n\n')
    rest = parts.pop()
    for (const part of parts) {
      if (part.startsWith(':')) { onComment(part.slice(1).trim()); continue }
      const data = part.slice('data: '.length)
      if (data === '[DONE]') continue
      const event = JSON.parse(data)
      if (event.error) throw new Error(event.error.message)
      yield event
    }
  }
}
