// How answers are sampled: a form for all that the server takes, sets of values with names, and what follows from them for a request.

import {$, asked, button, element, options} from './dom.js'
import {offers} from './server.js'
import {recall, remember} from './store.js'

// ---- the fields; an empty one leaves it to the model

const kinds = {   // from the text in a field to the value in a request; throws if it is none
  number: text => Number(text),
  text: text => text,
  lines: text => text.split('\n').filter(o => o),
  numbers: text => text.split(/[\s,]+/).filter(o => o).map(o => Number.isInteger(Number(o)) ? Number(o) : raise('a list of whole numbers')),
  json: text => { try { return JSON.parse(text) } catch { return raise('JSON') } },
  schema: text => kinds.json(text) && text,
  flag: text => text === 'yes'}

function raise(allowed) { throw new Error(allowed) }

const field = (kind, about, more = {}) => ({kind, about, ...more})
const count = (about, more = {}) => field('number', about, {min: 0, step: 1, ...more})

export const FIELDS = {
  temperature: field('number', '0 takes the likeliest token', {min: 0, max: 2, step: .1, common: true, plain: true}),
  top_p: field('number', 'among the likeliest that hold this share', {min: .05, max: 1, step: .05, common: true, plain: true}),
  top_k: field('number', 'among so many likeliest', {min: -1, step: 1, common: true}),
  max_tokens: count('longest answer', {common: true, plain: true}),
  seed: count('the same seed, the same answer', {common: true, plain: true}),
  min_p: field('number', 'none below this share of the likeliest', {min: 0, max: 1, step: .05, common: true}),
  presence_penalty: field('number', 'against tokens that were there', {min: -2, max: 2, step: .1}),
  frequency_penalty: field('number', 'the same, each time', {min: -2, max: 2, step: .1}),
  repetition_penalty: field('number', 'the same, by division', {min: .01, max: 100, step: .05}),
  min_tokens: count('no end before so many'),
  max_thinking_tokens: count('then it must answer'),
  priority: field('number', 'larger goes first', {step: 1}),
  ignore_eos: field('flag', 'go on after the end'),
  skip_special_tokens: field('flag', 'leave them out'),
  no_stop_trim: field('flag', 'keep what stopped it'),
  stop: field('lines', 'texts that end the answer, one a line'),
  stop_token_ids: field('numbers', 'tokens that end it'),
  stop_regex: field('text', 'a pattern that ends it'),
  json_schema: field('schema', 'the answer is JSON of this schema'),
  regex: field('text', 'the answer matches this pattern'),
  ebnf: field('text', 'the answer follows this grammar', {tall: true}),
  logit_bias: field('json', 'token: number, as JSON'),
  extra_key: field('text', 'share the cache within this name only')}

// not in the form: what the page asks for itself, and what is no chat
const OTHERS = ['n', 'logprobs', 'prompt_logprobs', 'logprob_start_len', 'token_ids_logprob', 'pooling', 'visible_tokens', 'separate_reasoning']

let unknown = []   // fields that the page has not heard of before

// what the server samples by: names, and what each is about; and the model's chat template
export function learn(parameters, template) {
  const names = Object.keys(parameters).filter(o => !FIELDS[o] && !OTHERS.includes(o))
  unknown = names.map(o => [o, field('json', parameters[o])])
  thinks = /\b(enable_thinking|reasoning_effort|thinking)\b/.test(template)
  if (parts() !== built) build()   // else somebody may be typing into it
}

// those that this server takes; plain: each server of OpenAI's chat does
const fields = () => [...Object.entries(FIELDS).filter(([, o]) => offers.more || o.plain), ...unknown]

const LINES = ['lines', 'schema', 'json']   // kinds with room for several lines

// ---- the state: two sets of values, one for each of two answers

const state = {sets: [{}, {}], two: false, probabilities: false, ...recall('settings', {})}
let shown = 0   // which set the form shows

export const two = () => state.two
export const probabilities = () => offers.more && state.probabilities

const save = () => remember('settings', state)

// the fields of a request that a set asks for; an Error names what is wrong
export function wishes(set) {
  const given = {}
  for (const [name, {kind}] of fields()) {
    const text = state.sets[set][name]
    if (!text) continue
    try { given[name] = kinds[kind](text) } catch (e) { throw new Error(`${name} must be ${e.message}.`) }
  }
  const thinking = state.sets[set].thinking
  if (thinking) given.reasoning_effort = thinking
  if (probabilities()) Object.assign(given, {logprobs: true, top_logprobs: 5})
  return given
}

export const systemPrompt = set => (state.sets[set].system ?? '').trim()

// ---- the form

const PRESETS = {exact: {temperature: '0'}, steady: {temperature: '0.3', top_p: '0.9'}, varied: {temperature: '1', min_p: '0.05'}}
const THINKING = [['', 'as the model has it'], ['none', 'off'], ['low', 'a little'], ['medium', 'on'], ['high', 'much']]
const THEMES = [['', 'as the system has it'], ['light', 'light'], ['dark', 'dark']]
const FLAGS = [['', 'auto'], ['yes', 'yes'], ['no', 'no']]

function labelled(text, input, name = '') {
  return element('label', name, text, input)
}

function select(pairs, value, act) {
  const made = element('select', '', ...options(pairs))
  made.value = value
  made.addEventListener('change', () => act(made.value))
  return made
}

function change(name, value) {
  const values = state.sets[shown]
  if (value === '') delete values[name]
  else values[name] = value
  save()
}

function input(name, {kind, about, min, max, step, tall}) {
  const value = state.sets[shown][name] ?? ''
  if (kind === 'flag') return labelled(name, Object.assign(select(FLAGS, value, o => change(name, o)), {name, title: about}))
  const made = element(tall || LINES.includes(kind) ? 'textarea' : 'input', '')
  Object.assign(made, {name, value, title: about, placeholder: kind === 'number' ? 'auto' : about, spellcheck: false, autocomplete: 'off'})
  if (kind === 'number') Object.assign(made, {type: 'number', min, max, step})
  made.addEventListener('input', () => {
    made.setCustomValidity('')
    change(name, made.validity.badInput ? 'x' : made.value)   // what is no number is told when it is sent
  })
  return labelled(name, made, kind === 'number' ? '' : 'wide')
}

function check(text, on, act) {
  const made = element('input', '')
  Object.assign(made, {type: 'checkbox', checked: on})
  made.addEventListener('change', () => act(made.checked))
  return element('label', 'check', made, text)
}

let unfolded = false   // whether all fields are seen
let thinks = false   // whether the model's template has a switch for thinking
let built = ''       // what the form was built of

const parts = () => JSON.stringify([unknown, thinks, offers])

export function build() {
  built = parts()
  const values = state.sets[shown], system = element('textarea', '')
  Object.assign(system, {id: 'system', rows: 3, value: values.system ?? '', placeholder: 'none'})
  system.addEventListener('input', () => change('system', system.value))
  const all = fields(), grid = common => element('div', 'wishes', ...all.filter(([, o]) => !!o.common === common).map(o => input(...o)))
  const more = element('details', '', element('summary', '', 'More'), grid(false))
  more.open = unfolded ||= all.some(([name, o]) => !o.common && values[name])
  more.addEventListener('toggle', () => unfolded = more.open)
  $('settings').replaceChildren(
    element('p', 'note', 'An empty field leaves it to the model.'), presets(), ...sets(), grid(true),
    ...(thinks ? [Object.assign(labelled('thinking', select(THINKING, values.thinking ?? '', o => change('thinking', o)), 'line'), {id: 'thinking'})] : []),
    labelled('system prompt', system, 'block'), ...(offers.more ? [more] : []),
    element('div', 'part', ...(offers.more ? [check('probabilities of tokens', state.probabilities, o => { state.probabilities = o; save() })] : []),
      check('two answers, side by side', state.two, turnTwo), labelled('theme', theme(), 'line')))
}

function turnTwo(on) {
  Object.assign(state, {two: on})
  shown = 0
  save()
  build()
}

// which of the two sets the form shows
function sets() {
  if (!state.two) return []
  const choose = i => {
    const made = button(`Answer ${'AB'[i]}`, () => { shown = i; build() }, 'quiet')
    made.setAttribute('aria-pressed', String(i === shown))
    return made
  }
  return [element('div', 'row sets', choose(0), choose(1))]
}

function presets() {
  const own = recall('presets', {}), all = {...PRESETS, ...own}, names = Object.keys(all)
  const choose = select([['', 'presets'], ['-', 'the model’s own'], ...names.map(o => [o, o])], '', name => {
    state.sets[shown] = name === '-' ? {} : {...all[name]}
    save()
    build()
  })
  choose.setAttribute('aria-label', 'presets')
  const drop = button('Forget', async () => {
    const name = await asked('Forget which preset?', {value: Object.keys(own)[0] ?? '', yes: 'Forget'})
    if (name === null) return
    delete own[name]
    remember('presets', own)
    build()
  }, 'quiet')
  drop.hidden = !Object.keys(own).length
  return element('div', 'row presets', choose, button('Save', async () => {
    const name = await asked('Save these settings as', {value: '', yes: 'Save'})
    if (!name) return
    remember('presets', {...own, [name]: state.sets[shown]})
    build()
  }, 'quiet'), drop)
}

function theme() {
  const made = select(THEMES, recall('theme', ''), o => { remember('theme', o || null); dispatchEvent(new Event('theme')) })
  made.id = 'theme'
  return made
}
