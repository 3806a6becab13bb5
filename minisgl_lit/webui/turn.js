// One message as it is seen: what it says, what it took, and what can be done with it.

import {button, copyButton, element, number, press} from './dom.js'
import {render} from './markdown.js'
import {tokenView} from './tokens.js'
import {bill, wayNow, wayView} from './way.js'
import {offers} from './server.js'

const CUT = ['length', 'abort', 'stopped', 'broken']   // reasons that leave an answer unfinished

export class Turn {
  // acts: what the buttons do, each given the message; place: its number among its siblings, and how many there are
  constructor(message, acts, place) {
    this.message = message
    this.said = element('div', 'said')
    this.element = element('article', `turn ${message.role}`, this.said)
    this.element.ariaLabel = message.role === 'user' ? 'Question' : 'Answer'
    this.acts = element('div', 'acts')
    this.panel = element('div', 'panel')
    this.open = null   // what the panel shows
    this.foot = element('p', 'bill')
    this.now = element('div', 'now')   // how far it is, while it is being written
    this.element.append(this.acts, this.panel)
    this.does = acts
    this.place = place
    if (place.beside) this.stand(place)
    this.draw()
  }

  // one of two beside each other
  stand({beside, choose}) {
    this.element.prepend(element('p', 'note', beside))
    this.element.ariaLabel = beside
    this.element.classList.toggle('chosen', !choose)
  }

  // whether it is still being written
  get running() { return this.message.role === 'assistant' && !this.message.reason }

  draw() {
    const {message} = this
    if (message.role === 'user') this.said.textContent = message.text
    else {
      this.drawThought()
      render(message.text, this.said)
      this.foot.textContent = this.running ? '' : bill(message)
      if (this.foot.textContent) this.said.after(this.foot)
      else this.foot.remove()
      if (this.running) this.said.after(this.now)
      else this.now.remove()
    }
    this.element.classList.toggle('running', this.running)
    if (this.running) this.acts.replaceChildren()
    else this.drawActs()
  }

  drawThought() {
    const {thought, text, seconds} = this.message
    if (!thought) return
    if (!this.thought) {
      this.summary = element('summary', '')
      this.thought = element('details', 'thought', this.summary, element('div', ''))
      this.said.before(this.thought)
    }
    this.thought.lastChild.textContent = thought
    this.summary.textContent = this.running && !text ? 'Thinking …' : seconds ? `Thought for ${number(seconds, 1)} s` : 'Thoughts'
  }

  drawActs() {
    const {message, does, place} = this, user = message.role === 'user'
    const act = (label, name) => button(label, () => does[name](message))
    const made = [copyButton(() => message.text)]
    if (user) made.push(act('Edit', 'edit'))
    else {
      made.push(act('Again', 'again'))
      if (offers.more && CUT.includes(message.reason) && message.text) made.push(act('Continue', 'proceed'))
      if (message.tokens?.length) made.push(this.toggle('Tokens', () => tokenView(message, text => does.branch(message, text))))
      if (offers.more) made.push(this.toggle('Details', () => wayView(message, does.messages(message))))
    }
    made.push(act('Delete', 'remove'))
    if (place.choose) made.push(act('Go on with this', 'choose'))
    this.acts.replaceChildren(...(place.of > 1 && !place.beside ? [this.turns()] : []), ...made)
  }

  // one of several branches: which, and the way to the others
  turns() {
    const {message, does, place} = this
    const to = (label, sign, by) => Object.assign(button(sign, () => does.turn(message, by)), {ariaLabel: label, disabled: !(place.i + by in [...Array(place.of)])})
    return element('span', 'turns', to('the branch before', '‹', -1), element('span', '', `${place.i + 1}/${place.of}`), to('the next branch', '›', 1))
  }

  focusTurns(by) {
    const [before, next] = this.acts.querySelectorAll('.turns button')
    for (const o of by < 0 ? [next, before] : [before, next]) o.focus()   // one that is disabled takes none
  }

  // what it waits for, before it has a way
  say(text) { if (this.now.textContent !== text) this.now.replaceChildren(element('p', 'bill', text)) }

  // its way so far; seconds: since it was asked for
  watch(way, seconds) { this.now.replaceChildren(...wayNow(way, seconds)) }

  toggle(label, view) {
    const made = button(label, () => {
      this.open = this.open === label ? null : label
      this.panel.replaceChildren(...(this.open ? [view()] : []))
      for (const o of this.acts.querySelectorAll('[aria-pressed]')) press(o, o.textContent === this.open)
      if (this.open) this.panel.scrollIntoView({block: 'nearest'})
    })
    press(made, this.open === label)
    return made
  }
}
