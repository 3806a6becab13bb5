// Small helpers for elements, numbers and the clipboard.

export const $ = id => document.getElementById(id)

export const number = (n, digits = 0) => n.toLocaleString('en', {maximumFractionDigits: digits})

// a share of 1; what is rare is told as exactly as what is not
export const percent = p => p < 1e-5 ? '< 0.001 %' : `${(p * 100).toLocaleString('en', {maximumSignificantDigits: p < .01 ? 1 : 3})} %`

// seconds, as short as can be read
export const duration = s => s < 1 ? `${number(s * 1e3, s < .01 ? 1 : 0)} ms` : `${number(s, s < 10 ? 2 : 1)} s`

export function element(tag, name, ...inside) {
  const made = document.createElement(tag)
  if (name) made.className = name
  made.append(...inside)
  return made
}

export function button(label, act, name = '') {
  const made = element('button', name, label)
  made.type = 'button'
  made.addEventListener('click', () => act(made))
  return made
}

// the old way is for pages that are not served over https, where browsers have no clipboard
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text)
  const field = element('textarea', '', text)
  document.body.append(field)
  field.select()
  document.execCommand('copy')
  field.remove()
}

// a button that copies a text, or what a function says then, and tells so for a moment
export const copyButton = (text, name = '') => button('Copy', async made => {
  await copy(text()).then(() => made.textContent = 'Copied', () => made.textContent = 'Cannot copy')
  setTimeout(() => made.textContent = 'Copy', 1500)
}, name)

export function download(name, text, type) {
  const link = element('a', '')
  link.href = URL.createObjectURL(new Blob([text], {type}))
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 1000)
}

// of a select, from pairs of value and text
export const options = pairs => pairs.map(([value, text]) => Object.assign(element('option', '', text), {value}))

// a toggle, as screen readers know it
export function press(made, on) {
  made.setAttribute('aria-pressed', String(on))
}

// ---- questions to the reader, in one dialog: what was said, or null

export function asked(question, {value = null, yes = 'OK'} = {}) {
  const field = element('input', ''), label = element('label', '', question, ...(value === null ? [] : [field]))
  const agree = element('button', 'main', yes), form = element('form', '', label), dialog = element('dialog', '', form)
  field.value = value ?? ''
  form.append(element('div', 'row', button('Cancel', () => dialog.close()), agree))
  return new Promise(done => {
    let said = null
    form.addEventListener('submit', e => { e.preventDefault(); said = field.value.trim(); dialog.close() })
    dialog.addEventListener('close', () => { dialog.remove(); done(said) })
    document.body.append(dialog)
    dialog.showModal()
    if (value !== null) field.select()
  })
}
