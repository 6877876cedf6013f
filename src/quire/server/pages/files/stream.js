// One answer of the server: a chat completion as a stream of events.

import { answerOf, call } from "./dom.js";

// Send messages, and hand each change to `onChange` as {content, reasoning, toolCalls, finish, usage}, all of it so far.
export async function streamAnswer(body, signal, onChange) {
  const response = await call("v1/chat/completions", {
    method: "POST", signal, headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) await answerOf(response);
  const answer = { content: "", reasoning: "", toolCalls: [], finish: null, usage: null };
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    add(answer, chunk);
    onChange(answer);
  }
  return answer;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function add(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  const [choice] = chunk.choices ?? [];
  if (!choice) return;
  const delta = choice.delta ?? {};
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const known = (answer.toolCalls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id ||= part.id ?? "";
    known.function.name += part.function?.name ?? "";
    known.function.arguments += part.function?.arguments ?? "";
  }
  answer.finish = choice.finish_reason ?? answer.finish;
}
