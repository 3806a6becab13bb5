// Light or dark before anything is drawn: as was chosen, else as the system has it. Not a module, since modules come too late.
{
  const system = matchMedia('(prefers-color-scheme: dark)')
  const choose = () => {
    let chosen = null
    try { chosen = JSON.parse(localStorage.getItem('theme')) } catch { /* nothing is kept */ }
    const dark = chosen ? chosen === 'dark' : system.matches
    document.documentElement.dataset.theme = dark ? 'dark' : 'light'
  }
  choose()
  system.addEventListener('change', choose)
  addEventListener('theme', choose)
}
