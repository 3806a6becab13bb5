// needs: ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
// Text, streams, a tool in two steps, objects; over four protocols, and embeddings
import assert from 'node:assert'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embed, generateObject, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const [url, name] = process.argv.slice(2)
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })
const compatible = createOpenAICompatible({ name: 'lit', baseURL: `${url}/v1`, apiKey: 'none', supportsStructuredOutputs: true })
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' })
const tools = { get_time: tool({ description: 'The time in a city', inputSchema: z.object({ city: z.string() }), execute: async () => '14:30' }) }
for (const model of [openai(name), openai.chat(name), compatible(name), anthropic(name)]) {
  const common = { model, temperature: 0, maxOutputTokens: 100, maxRetries: 0 }
  assert.equal((await generateText({ ...common, prompt: 'Count from 3 to 5' })).text, '3, 4, 5')
  let text = ''
  for await (const piece of streamText({ ...common, prompt: 'Count from 3 to 5' }).textStream) text += piece
  assert.equal(text, '3, 4, 5')
  const asked = { ...common, prompt: 'What time is it in Oslo?', tools, stopWhen: stepCountIs(3) }
  assert.equal((await generateText(asked)).text, 'It is 14:30 in Oslo.')
  assert.equal(await streamText(asked).text, 'It is 14:30 in Oslo.')
  const { object } = await generateObject({ ...common, prompt: 'Oslo or Rome?', schema: z.object({ city: z.enum(['Oslo', 'Rome']) }) })
  assert.ok(['Oslo', 'Rome'].includes(object.city))
}
assert.ok((await embed({ model: openai.embedding(name), value: 'a page', maxRetries: 0 })).embedding.length > 8)
