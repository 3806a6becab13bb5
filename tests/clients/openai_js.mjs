// needs: openai
// Chats, streams, responses, tools that it runs itself, embeddings
import assert from 'node:assert'
import OpenAI from 'openai'

const [url, model] = process.argv.slice(2)
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 })
const messages = [{ role: 'user', content: 'Count from 3 to 5' }]
const said = await client.chat.completions.create({ model, messages, temperature: 0 })
assert.equal(said.choices[0].message.content, '3, 4, 5')
let text = ''
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? ''
assert.equal(text, '3, 4, 5')
const answer = await client.responses.create({ model, input: 'Count from 3 to 5', temperature: 0 })
assert.equal(answer.output_text, '3, 4, 5')
const parameters = { type: 'object', properties: { city: { type: 'string' } } }
const runner = client.chat.completions.runTools({
  model, temperature: 0, messages: [{ role: 'user', content: 'What time is it in Oslo?' }],
  tools: [{ type: 'function', function: { name: 'get_time', parse: JSON.parse, parameters, function: () => '14:30' } }],
})
assert.equal(await runner.finalContent(), 'It is 14:30 in Oslo.')
const found = await client.embeddings.create({ model, input: 'a page' })
assert.ok(found.data[0].embedding.length > 8)
