// What this browser keeps: conversations in IndexedDB, small things in localStorage. Nothing of it leaves the browser.

const opened = new Promise((done, failed) => {
  const request = indexedDB.open('minisgl_lit', 1)
  request.onupgradeneeded = () => request.result.createObjectStore('conversations', {keyPath: 'id'})
  request.onsuccess = () => done(request.result)
  request.onerror = () => failed(new Error('This browser keeps no conversations here (a private window?).'))
})
opened.catch(() => {})   // each use tells it again

async function use(mode, act) {
  const store = (await opened).transaction('conversations', mode).objectStore('conversations')
  return new Promise((done, failed) => {
    const request = act(store)
    request.onsuccess = () => done(request.result)
    request.onerror = () => failed(new Error('This browser could not keep the conversation: its storage is full.'))
  })
}

export const conversations = () => use('readonly', o => o.getAll())
export const keep = talk => use('readwrite', o => o.put(talk))
export const forget = id => use('readwrite', o => o.delete(id))

// a small thing, as JSON; unreadable or forbidden storage counts as empty
export function recall(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(name)) ?? otherwise } catch { return otherwise }
}

export function remember(name, value) {
  try {
    if (value === null) localStorage.removeItem(name)
    else localStorage.setItem(name, JSON.stringify(value))
  } catch { /* then it is known until the page is left */ }
}
