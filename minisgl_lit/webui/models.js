// The models of the server, and the menu of those that can be talked with, where there are several.

import {$, element, options} from './dom.js'
import {ask} from './server.js'
import {recall, remember} from './store.js'

let listed = []   // as the server lists them
let wish = recall('model', '')   // the name that was chosen last, if it is still there
let drawn = ''    // what the menu was drawn of

// ---- which there are, and which is chosen

const byName = name => listed.find(o => o.id === name)

// one that only embeds is no partner; a server of another kind does not tell
const talks = o => o.capabilities?.includes('completion') ?? true

const offered = () => listed.some(talks) ? listed.filter(talks) : listed

export const chosen = () => offered().find(o => o.id === wish) ?? offered().find(o => o.default) ?? offered()[0]

// what requests name; undefined if there is one alone, which needs no name
export const theModel = () => listed.length > 1 ? chosen().id : undefined

// the model itself, if that is an adapter
export const theBase = (name = theModel()) => byName(name)?.parent ?? name

// a question about it, which has no body
export const about = (path, name = theModel()) => name === undefined ? path : `${path}?model=${encodeURIComponent(theBase(name))}`

// 'loaded', 'loading' or 'not loaded': of an adapter that is its base; a server of one model tells nothing, and has it
export const theState = (o = chosen()) => {
  const {value = 'loaded', error} = (o.status ?? byName(o.parent)?.status) ?? {}
  return value === 'unloaded' ? error ? 'failed' : 'not loaded' : value
}

// ---- the menu

export async function refresh() {
  listed = (await ask('v1/models')).data
  const made = JSON.stringify(offered().map(o => [o.id, o.parent, theState(o)]))
  if (made !== drawn) draw()   // else somebody may have it open
  drawn = made
}

function draw() {
  const bases = offered().filter(o => !byName(o.parent)), several = offered().length > 1
  $('models').replaceChildren(...bases.flatMap(base => {
    const below = offered().filter(o => o.parent === base.id)
    const made = options([base, ...below].map(o => [o.id, o.id + (theState(o) === 'loaded' ? '' : ` (${theState(o)})`)]))
    return below.length ? [Object.assign(element('optgroup', '', ...made), {label: `${base.id} and its adapters`})] : made
  }))
  $('models').value = chosen().id
  $('model').textContent = chosen().id   // where there is no menu
  $('models').hidden = !several
  $('model').hidden = several
}

// onChosen: what to do when another one is chosen
export function start(onChosen) {
  $('models').addEventListener('change', () => {
    wish = $('models').value
    remember('model', wish)
    onChosen()
  })
  $('models').addEventListener('focus', () => refresh().catch(() => {}))   // what cannot be asked now is told by the engine's side
}
