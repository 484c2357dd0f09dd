// JavaScript clients against an endpoint: `node openai_clients.mjs CLIENT URL MODEL` prints what each of four uses gave, as JSON.
// Packages are looked for from the working directory.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [client, url, model] = process.argv.slice(2);
const require = createRequire(pathToFileURL(process.cwd() + "/"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const question = "How is the weather in Rome?";
const city = { type: "string", enum: ["Rome", "Paris"] };
const weather = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };
const report = {
  type: "object",
  properties: { city, sunny: { type: "boolean" } },
  required: ["city", "sunny"],
  additionalProperties: false,
};
const told = ({ city }) => `sunny in ${city}`;

async function openai() {
  const { OpenAI } = await load("openai");
  const { zodResponseFormat } = await load("openai/helpers/zod");
  const { z } = await load("zod");
  const asking = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const messages = [{ role: "user", content: question }];
  const options = { model, temperature: 0, max_tokens: 16 };
  const chat = (more) => asking.chat.completions.create({ ...options, messages, ...more });
  return {
    async chat() {
      const response = await asking.responses.create({ model, input: question, temperature: 0, max_output_tokens: 16 });
      const { content } = (await chat()).choices[0].message;
      if (response.output_text !== content) throw new Error(response.output_text);
      return content;
    },
    async stream() {
      const pieces = [];
      for await (const piece of await chat({ stream: true, stream_options: { include_usage: true } }))
        if (piece.choices.length) pieces.push(piece.choices[0].delta.content ?? "");
      return pieces;
    },
    async tools() {
      const calls = [];
      const tool = {
        type: "function",
        function: {
          name: "get_weather",
          parameters: weather,
          parse: JSON.parse,
          function: (given) => (calls.push(given.city), told(given)),
        },
      };
      const runner = asking.chat.completions.runTools({
        ...options,
        max_tokens: 64,
        messages,
        tools: [tool],
        tool_choice: { type: "function", function: { name: "get_weather" } },
      });
      await runner.done();
      const first = runner.messages;
      const tools = [{ type: "function", function: { name: "get_weather", parameters: weather } }];
      const answer = await chat({ messages: first, tools, tool_choice: "none" });
      return { city: calls[0], answer: answer.choices[0].message.content };
    },
    async structure() {
      const shape = z.object({ city: z.enum(["Rome", "Paris"]), sunny: z.boolean() });
      const format = zodResponseFormat(shape, "report");
      const answer = await asking.chat.completions.parse({ model, temperature: 0, messages, response_format: format });
      return answer.choices[0].message.parsed;
    },
  };
}

async function ai() {
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const { generateText, streamText, Output, jsonSchema, tool } = await load("ai");
  const provider = createOpenAICompatible({
    name: "hone",
    baseURL: url,
    apiKey: "none",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  const options = { model: provider(model), temperature: 0, maxOutputTokens: 16, maxRetries: 0 };
  return {
    chat: async () => (await generateText({ ...options, prompt: question })).text,
    async stream() {
      const pieces = [];
      const failed = [];
      const answer = streamText({ ...options, prompt: question, onError: ({ error }) => failed.push(error) });
      for await (const piece of answer.textStream) pieces.push(piece);
      if (failed.length) throw failed[0];
      return pieces;
    },
    async tools() {
      const known = { get_weather: tool({ description: "weather", inputSchema: jsonSchema(weather), execute: told }) };
      const long = { ...options, maxOutputTokens: 64, tools: known };
      const first = await generateText({ ...long, prompt: question, toolChoice: "required" });
      const messages = [{ role: "user", content: question }, ...first.response.messages];
      const answer = await generateText({ ...long, messages, toolChoice: "none" });
      return { city: first.toolCalls[0].input.city, answer: answer.text };
    },
    async structure() {
      const output = Output.object({ schema: jsonSchema(report) });
      return (await generateText({ ...options, maxOutputTokens: 64, prompt: question, output })).output;
    },
  };
}

const results = {};
const uses = await { openai, ai }[client]();
for (const name of ["chat", "stream", "tools", "structure"]) {
  try {
    results[name] = { result: await uses[name]() };
  } catch (error) {
    results[name] = { error: String(error.stack ?? error).slice(0, 3000) };
  }
}
process.stdout.write(JSON.stringify(results));
