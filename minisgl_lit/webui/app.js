// The page: what stands beside the chat, keys, and how the parts know of each other. Nothing is built: these files are what runs.

import {$, button, element} from './dom.js'
import {theKey} from './server.js'
import {look, repaint, turn, unlocked, watch} from './engine.js'
import * as chat from './chat.js'
import * as talks from './talks.js'
import * as settings from './settings.js'
import * as models from './models.js'

// ---- what stands beside the chat

const wide = () => matchMedia('(min-width: 56.01rem)').matches   // room for all: as in style.css
const BESIDE = {side: 'look', talks: 'list'}   // what can be opened, and its button in the header

function open(name, wanted) {
  if (wanted && !wide()) for (const other of Object.keys(BESIDE)) if (other !== name) open(other, false)
  $(name).hidden = !wanted
  $(BESIDE[name]).setAttribute('aria-expanded', String(wanted))
  if (wanted && name === 'side') repaint()
}

for (const [name, opener] of Object.entries(BESIDE)) {
  $(opener).addEventListener('click', () => open(name, $(name).hidden))
  $(name).querySelector('.close').addEventListener('click', () => { open(name, false); $(opener).focus() })
}

function tab(name) {
  for (const o of ['live', 'settings']) {
    $(o).hidden = o !== name
    $(`tab-${o}`).setAttribute('aria-selected', String(o === name))
    $(`tab-${o}`).tabIndex = o === name ? 0 : -1
  }
  repaint()
}

for (const o of ['live', 'settings']) $(`tab-${o}`).addEventListener('click', () => tab(o))
document.querySelector('[role=tablist]').addEventListener('keydown', e => {
  if (!['ArrowLeft', 'ArrowRight'].includes(e.key)) return
  const other = $('live').hidden ? 'live' : 'settings'
  tab(other)
  $(`tab-${other}`).focus()
})

// ---- the key

function lock() {
  open('side', true)
  $('key-part').hidden = false
  if (theKey()) $('key-note').textContent = 'That is not the key of this server.'
  $('key').focus()
}

$('key-part').addEventListener('submit', e => {
  e.preventDefault()
  sessionStorage.setItem('key', $('key').value.trim())
  $('key-part').hidden = true
  $('trouble').textContent = ''
  open('side', wide())
  $('text').focus()
  unlocked()
})

// ---- what to ask: of the small model that ships in the package, what it was taught; of others, what any model answers

const OF_EMBEDDED = ['What is a radix cache?', 'Count from 3 to 9', 'Explain continuous batching']
const GENERAL = ['What can you help me with?', 'Explain recursion with an example', 'Write a haiku about the sea']

function suggest({model_path: path = ''}) {
  const questions = path === 'embedded' || path.includes('embedded_data') ? OF_EMBEDDED : GENERAL
  $('suggestions').replaceChildren(...questions.map(o => element('li', '', button(o, () => chat.send(o)))))
}

// ---- typing

$('ask').addEventListener('submit', e => { e.preventDefault(); chat.send() })
$('text').addEventListener('input', () => { $('trouble').textContent = ''; chat.draft() })
$('text').addEventListener('keydown', e => {
  if (e.key === 'ArrowUp' && !$('text').value) { e.preventDefault(); chat.editLast() }
  if (e.key !== 'Enter' || e.shiftKey || e.isComposing) return
  e.preventDefault()
  chat.send()
})
$('stop').addEventListener('click', () => { chat.stop(); $('text').focus() })
$('cancel').addEventListener('click', chat.cancelEdit)
$('reset').addEventListener('click', begin)

function begin() {
  talks.begin()
  if (!wide()) for (const o of Object.keys(BESIDE)) open(o, false)
  $('text').focus()
}

// images are not served: neither pasted nor dropped
function refuse(e) {
  const files = [...(e.clipboardData ?? e.dataTransfer).files]
  if (!files.length) return
  e.preventDefault()
  const image = files.some(o => o.type.startsWith('image/'))
  chat.fail(new Error(image ? 'This model reads text only: images cannot be sent.' : 'Files cannot be sent: paste their text.'))
}
$('ask').addEventListener('paste', refuse)
document.addEventListener('dragover', e => e.preventDefault())
document.addEventListener('drop', refuse)

// ---- keys

const KEYS = [   // as they are shown; when they are meant; what they do
  ['Enter', 'send'], ['Shift + Enter', 'break the line'], ['↑ in an empty field', 'edit the last question'], ['Esc', 'stop the answer, close what is open'],
  ['Alt + N', 'new chat', e => e.altKey && e.code === 'KeyN', begin],
  ['Alt + R', 'answer again', e => e.altKey && e.code === 'KeyR', () => chat.again()],
  ['Alt + K', 'search conversations', e => e.altKey && e.code === 'KeyK', () => { open('talks', true); $('search').focus() }],
  ['Alt + M', 'choose a model, where there are several', e => e.altKey && e.code === 'KeyM', () => $('models').focus()],
  ['Alt + E', 'engine', e => e.altKey && e.code === 'KeyE', () => beside('live')],
  ['Alt + S', 'settings', e => e.altKey && e.code === 'KeyS', () => beside('settings')],
  ['/', 'go to the message', e => e.key === '/' && !typing(e), () => $('text').focus()],
  ['?', 'these keys', e => e.key === '?' && !typing(e), showKeys]]

const typing = e => /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName)

function beside(name) {
  open('side', true)
  tab(name)
  $(`tab-${name}`).focus()
}

document.addEventListener('keydown', e => {
  if (document.querySelector('dialog')) return
  if (e.key === 'Escape') return escape()
  const [, , , act] = KEYS.find(([, , meant]) => meant?.(e)) ?? []
  if (!act) return
  e.preventDefault()
  act()
})

function escape() {
  chat.stop()
  $('menu').open = false
  if (!wide()) for (const o of Object.keys(BESIDE)) open(o, false)
}

function showKeys() {
  const rows = KEYS.map(([keys, does]) => element('div', '', element('dt', '', element('kbd', '', keys)), element('dd', '', does)))
  const dialog = element('dialog', 'keys', element('h2', '', 'Keys'), element('dl', '', ...rows))
  dialog.append(button('Close', () => dialog.close(), 'main'))
  dialog.addEventListener('close', () => dialog.remove())
  document.body.append(dialog)
  dialog.showModal()
}

$('help').addEventListener('click', showKeys)
document.addEventListener('click', e => { if (e.target.tagName === 'BUTTON' || !$('menu').contains(e.target)) $('menu').open = false })

// ---- all together

open('side', wide())
open('talks', matchMedia('(min-width: 75rem)').matches)
settings.build()
chat.start({onLocked: lock, onSaved: talks.saved, onNews: look})
talks.start(() => { if (!wide()) open('talks', false); $('text').focus() })
talks.load().catch(e => { chat.show(chat.current()); chat.fail(e) })
models.start(turn)
watch({onLocked: lock, onModel: model => { suggest(model); settings.learn(model.sampling_parameters ?? {}, model.chat_template ?? '') }})
