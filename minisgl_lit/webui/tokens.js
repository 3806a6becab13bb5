// Each token of an answer, coloured by its probability, and what else might have come, to branch from.

import {button, element, percent} from './dom.js'

const UNSURE = .5   // a probability below this is marked by more than its colour
const SPECIAL = /^<[|｜].*[|｜]>$/   // marks such as the end of a turn, which are no text

const share = logprob => Math.exp(logprob)
const visible = text => text.replaceAll('\n', '⏎').replaceAll('\t', '⇥').replaceAll(' ', '␣') || '(nothing)'

// what the answer said before a token; null if that cannot be told, as within a character of several tokens
function before(message, i) {
  const text = message.tokens.slice(0, i).filter(o => !o.thought).map(o => o.text).join('')
  return message.text.trimStart().startsWith(text.trimStart()) ? text.trimStart() : null
}

// branch: called with the text from which another answer shall go on
export function tokenView(message, branch) {
  const spans = message.tokens.map(tokenSpan), told = element('div', 'alternatives'), text = element('div', 'tokens', ...spans)
  let chosen = -1
  const choose = i => {
    spans[chosen]?.classList.remove('chosen')
    chosen = Math.max(0, Math.min(i, spans.length - 1))
    spans[chosen].classList.add('chosen')
    told.replaceChildren(alternatives(message, chosen, branch))
    told.scrollIntoView({block: 'nearest'})
  }
  Object.assign(text, {tabIndex: 0, role: 'group', ariaLabel: 'Tokens: the arrow keys choose one'})
  told.setAttribute('aria-live', 'polite')
  text.addEventListener('click', e => { const i = spans.indexOf(e.target); if (i >= 0) choose(i) })
  text.addEventListener('keydown', e => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[e.key]
    if (!by || !spans.length) return
    e.preventDefault()
    choose(chosen + by)
  })
  return element('div', 'token-view', text, element('p', 'note scale', 'likely ', element('i', ''), ' unlikely; choose a token to see what else might have come'), told)
}

function tokenSpan({text, logprob, thought}) {
  const p = share(logprob), made = element('span', [thought && 'thinks', p < UNSURE && 'unsure'].filter(o => o).join(' '), text)
  made.style.setProperty('--p', p.toFixed(3))
  made.title = percent(p)
  return made
}

function alternatives(message, i, branch) {
  const {text, logprob, top, thought} = message.tokens[i], prefix = thought ? null : before(message, i)
  const others = top.some(o => o.text === text) ? top : [...top, {text, logprob}]
  const row = o => {
    const bar = element('i', ''), mine = o.text === text
    bar.style.setProperty('--p', share(o.logprob).toFixed(3))
    const go = mine || prefix === null || SPECIAL.test(o.text) ? [] : [button('Branch', () => branch(prefix + o.text), 'small')]
    return element('li', mine ? 'mine' : '', element('code', '', visible(o.text)), element('span', 'share', bar, percent(share(o.logprob))), ...go)
  }
  return element('ul', '', ...others.map(row))
}
