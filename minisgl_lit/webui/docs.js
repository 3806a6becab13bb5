// The page /docs: every route of /openapi.json, with the fields of its body. Text only: no answer becomes markup.
const make = (tag, text, ...children) => {
  const made = document.createElement(tag)
  made.append(text, ...children)
  return made
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split('/').pop()
  if (schema.const !== undefined) return JSON.stringify(schema.const)
  if (schema.enum) return schema.enum.map(o => JSON.stringify(o)).join(' or ')
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf
  if (several) return several.map(kind).join(' or ')
  if (schema.type === 'array') return `list of ${kind(schema.items ?? {})}`
  return schema.type ?? 'anything'
}

function fields(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => make('tr', '',
    make('th', '', make('code', name + (schema.required?.includes(name) ? ' *' : ''))), make('td', kind(field)),
    make('td', field.default === undefined || field.default === null ? '' : `default ${JSON.stringify(field.default)}`)))
  return make('table', '', ...rows)
}

function route(path, method, told) {
  const body = told.requestBody?.content?.['application/json']?.schema
  const head = make('summary', '', make('b', method.toUpperCase()), make('code', path), ` ${told.description ?? told.summary ?? ''}`)
  return make('details', '', head, make('p', body ? `Body: ${kind(body)}` : 'No body'))
}

async function show() {
  const key = sessionStorage.getItem('key')
  const answer = await fetch('openapi.json', {headers: key ? {authorization: `Bearer ${key}`} : {}})
  if (answer.status === 401) throw new Error('This server wants a key: enter it on the page with the chat.')
  if (!answer.ok) throw new Error(`The server answers ${answer.status}.`)
  const {paths, components} = await answer.json()
  const routes = Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, told]) => route(path, method, told)))
  const schemas = Object.entries(components?.schemas ?? {}).map(([name, schema]) => make('details', '', make('summary', '', make('code', name),
    ` ${schema.description ?? ''}`), fields(schema)))
  document.getElementById('routes').replaceChildren(...routes, make('h2', 'Bodies'), ...schemas)
}

show().catch(error => {
  const told = make('p', error.message)
  told.className = 'error'
  document.getElementById('routes').replaceChildren(told)
})
