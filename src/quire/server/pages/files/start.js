// The start page: the model and its state, again every few seconds, and lines to copy.

import { apiKey, ask, byId, copyButton, keepApiKey, show, tell } from "./dom.js";

const PAUSE_MS = 3000;
const ROOT = new URL("..", import.meta.url).href.replace(/\/$/, "");
let timer;

function shellLine(model) {
  const path = model.generates ? "v1/chat/completions" : "v1/embeddings";
  const body = model.generates
    ? { model: model.models[0], messages: [{ role: "user", content: "Hello" }] }
    : { model: model.models[0], input: "Hello" };
  const key = apiKey() ? " \\\n  -H 'Authorization: Bearer YOUR_KEY'" : "";
  const json = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${ROOT}/${path}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

function pythonLines(model) {
  const name = JSON.stringify(model.models[0]);
  const call = model.generates
    ? `client.chat.completions.create(\n    model=${name}, messages=[{"role": "user", "content": "Hello"}]\n)\nprint(answer.choices[0].message.content)`
    : `client.embeddings.create(model=${name}, input="Hello")\nprint(answer.data[0].embedding)`;
  const key = apiKey() ? "YOUR_KEY" : "none";
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${ROOT}/v1", api_key="${key}")\nanswer = ${call}`;
}

function duration(seconds) {
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

function showModel(model) {
  const name = model.models[0];
  document.title = `${name} · Quire`;
  show("model", name);
  const billions = model.num_parameters >= 1e9 ? `${(model.num_parameters / 1e9).toFixed(1)} billion` : `${(model.num_parameters / 1e6).toFixed(1)} million`;
  const engines = model.num_engines > 1 ? `, on ${model.num_engines} engines` : "";
  show("lead", `${billions} parameters of ${model.quantization ?? model.dtype} on ${model.device}${engines}, served by Quire ${model.version}.`);
  show("running", model.num_running);
  show("waiting", model.num_waiting);
  show("used", model.num_used_blocks);
  show("cached", model.num_cached_blocks);
  show("blocks", model.num_blocks);
  show("context", model.max_model_len);
  show("uptime", duration(model.uptime_s));
  show("shell", shellLine(model));
  show("python", pythonLines(model));
  byId("figures").hidden = false;
  document.querySelectorAll("[data-map]").forEach((each) => { each.hidden = !model.has_block_map; });
  document.querySelectorAll("[data-no-map]").forEach((each) => { each.hidden = model.has_block_map; });
  tell(model.problem ?? "ready", model.problem !== null);
}

async function refresh() {
  clearTimeout(timer);
  try {
    showModel(await ask("status"));
    byId("key-form").hidden = true;
  } catch (error) {
    byId("key-form").hidden = error.status !== 401;
    byId("figures").hidden = true;
    tell(error.status ? error.message : "the server does not answer; trying again", true);
    if (error.status === 401) return;
  }
  timer = setTimeout(refresh, PAUSE_MS);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepApiKey(byId("key").value.trim());
  refresh();
});
byId("shell-copy").append(copyButton(() => byId("shell").textContent));
byId("python-copy").append(copyButton(() => byId("python").textContent));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else refresh();
});
refresh();
