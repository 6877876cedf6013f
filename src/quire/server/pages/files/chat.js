// The chat: draws the branch of a conversation that is shown, and asks for answers.

import { Conversation, savedConversations } from "./conversation.js";
import { apiKey, ask, byId, copyButton, element, keepApiKey, tell } from "./dom.js";
import { markdown } from "./markdown.js";
import { streamAnswer } from "./stream.js";

// Fields of a request: the default without one of the model's, and bounds.
const PARAMS = {
  temperature: { fallback: 1, min: 0, max: 2, step: 0.1 },
  top_p: { fallback: 1, min: 0.01, max: 1, step: 0.01 },
  top_k: { fallback: 0, min: 0, step: 1 },
  min_p: { fallback: 0, min: 0, max: 1, step: 0.01 },
  max_tokens: { fallback: "all that fit", min: 1, step: 1 },
  seed: { fallback: "the server's", step: 1 },
  presence_penalty: { fallback: 0, min: -2, max: 2, step: 0.1 },
  frequency_penalty: { fallback: 0, min: -2, max: 2, step: 0.1 },
  repetition_penalty: { fallback: 1, min: 0.01, max: 2, step: 0.01 },
};
const NAMES = { user: "You", assistant: "Model", tool: "Tool" };
const NARROW = matchMedia("(max-width: 62rem)");
const NEAR_END_PX = 80;
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_IMAGE_BYTES = 2 << 20; // a body has 4 MiB, of base64

let conversation = savedConversations()[0] ?? new Conversation();
let stopper; // of the answer that is being written
let edited; // the message that is being edited
let images = []; // data: URLs for the message that is being written

// --- messages --------------------------------------------------------------------------------------------------------

function button(text, onPress, settings = {}) {
  const made = element("button", { type: "button", class: "small", text, ...settings });
  made.addEventListener("click", onPress);
  return made;
}

function drawMessages() {
  const path = conversation.path();
  const welcome = element("p", { text: "Ask something. What is written here stays in this browser and on the server." });
  byId("messages").replaceChildren(...(path.length ? path.map(drawMessage) : [welcome]));
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

function drawMessage(message) {
  const name = NAMES[message.role] ?? message.role;
  const made = element("article", { class: `message ${message.role}`, id: message.id, "aria-label": name }, element("h2", { text: name }));
  if (message === edited) made.append(editor(message));
  else made.append(...bodyOf(message), below(message));
  return made;
}

function bodyOf(message) {
  const parts = [];
  if (message.reasoning) {
    const thinking = element("details", { class: "thinking" }, element("summary", { text: "Reasoning" }), element("div", { text: message.reasoning }));
    thinking.open = !message.content && !message.toolCalls?.length;
    parts.push(thinking);
  }
  if (message.images?.length) parts.push(element("div", { class: "images" }, ...message.images.map((url) => picture(url))));
  const text = element("div", { class: "text" });
  if (message.role === "assistant") text.append(markdown(message.content));
  else text.textContent = message.content;
  parts.push(text, ...(message.toolCalls ?? []).map((toolCall) => drawToolCall(toolCall)));
  if (message.error) parts.push(element("p", { class: "error", text: message.error }));
  return parts;
}

function picture(url) {
  return element("img", { src: url, alt: "image of the message" });
}

function drawToolCall(toolCall) {
  return element("div", { class: "tool" },
    element("span", { text: "Calls " }), element("code", { text: toolCall.function.name }),
    element("pre", {}, element("code", { text: indented(toolCall.function.arguments) })));
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // it is being written
  }
}

// The row below a message: branches, what can be done, and figures of an answer.
function below(message) {
  const row = element("div", { class: "below" });
  const branches = conversation.branches(message);
  if (branches.length > 1) {
    const number = branches.indexOf(message);
    const turn = (step) => { conversation.turn(message, step); keep(); drawMessages(); };
    row.append(
      button("←", () => turn(-1), { "aria-label": "branch before", ...(number === 0 && { disabled: "" }) }),
      element("span", { text: `branch ${number + 1} of ${branches.length}` }),
      button("→", () => turn(1), { "aria-label": "branch behind", ...(number === branches.length - 1 && { disabled: "" }) }));
  }
  if (message.role === "user") row.append(button("Edit", () => { edited = message; drawMessages(); byId("editor").focus(); }));
  if (message.role === "assistant") {
    row.append(button("Retry", () => answer(conversation.messages[message.parent])), copyButton(() => message.content));
    const isLast = conversation.path().at(-1) === message;
    if (isLast && message.toolCalls?.length) row.append(button("Answer the calls", () => answerCalls(message)));
  }
  if (message.stats) row.append(element("span", { class: "figure", text: figures(message) }));
  return row;
}

function figures(message) {
  const { ttftS, decodeS, usage } = message.stats;
  const parts = [];
  if (ttftS !== undefined) parts.push(`first token ${(1000 * ttftS).toFixed(0)} ms`);
  if (usage) {
    const rate = (usage.completion_tokens - 1) / decodeS;
    if (usage.completion_tokens > 1 && Number.isFinite(rate)) parts.push(`${rate.toFixed(1)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`prompt ${usage.prompt_tokens} tokens: ${cached} cached, ${usage.prompt_tokens - cached} new`);
    parts.push(`answer ${usage.completion_tokens}`);
    const others = conversation.branches(message).length > 1 || conversation.branches(conversation.messages[message.parent] ?? message).length > 1;
    if (others && cached) parts.push(`${cached} shared with other branches, not computed again`);
  }
  if (message.finish === "length") parts.push("cut at the longest length");
  if (message.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function editor(message) {
  const text = element("textarea", { id: "editor", rows: 4, "aria-label": "Edited message" });
  text.value = message.content;
  const close = () => { edited = undefined; drawMessages(); };
  const send = () => {
    edited = undefined;
    answer(conversation.add(parentOf(message), { role: "user", content: text.value, images: message.images }));
  };
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (isSend(event)) { event.preventDefault(); send(); }
  });
  return element("div", { class: "editor" }, text, button("Send as a branch", send), " ", button("Cancel", close));
}

function parentOf(message) {
  return message.parent in conversation.messages ? message.parent : undefined;
}

// Ask for the results of tool calls, each in a field of its own, and go on with them.
function answerCalls(message) {
  const fields = message.toolCalls.map((toolCall) => ({ toolCall, field: element("textarea", { rows: 2, "aria-label": `result of ${toolCall.function.name}` }) }));
  const send = () => {
    let last = message;
    for (const { toolCall, field } of fields) last = conversation.add(last.id, { role: "tool", content: field.value, toolCallId: toolCall.id });
    answer(last);
  };
  const rows = fields.map(({ toolCall, field }) => element("label", { text: `Result of ${toolCall.function.name}` }, field));
  byId(message.id).append(element("div", { class: "tool" }, ...rows, button("Send the results", send)));
  fields[0].field.focus();
}

// --- answers ---------------------------------------------------------------------------------------------------------

// Ask for an answer to a message of the path, as a branch of those that it has.
async function answer(question) {
  if (stopper) return;
  const own = conversation; // another may be opened meanwhile
  const asked = { ...request(), messages: own.asked(question) };
  const written = own.add(question.id, { role: "assistant", content: "", reasoning: "", toolCalls: [] });
  stopper = new AbortController();
  setWriting(true);
  drawMessages();
  const startedMs = performance.now();
  let firstMs;
  let frame;
  const draw = () => { frame = undefined; redraw(written); };
  try {
    await streamAnswer(asked, stopper.signal, (sofar) => {
      const hasText = sofar.content || sofar.reasoning || sofar.toolCalls.length;
      if (hasText) firstMs ??= performance.now();
      const { content, reasoning, toolCalls, finish, usage } = sofar;
      const stats = { ttftS: firstMs && (firstMs - startedMs) / 1000, decodeS: (performance.now() - firstMs) / 1000, usage };
      Object.assign(written, { content, reasoning, toolCalls, finish, stats });
      frame ??= requestAnimationFrame(draw);
    });
    tell(`answered: ${written.stats?.usage?.completion_tokens ?? 0} tokens`);
  } catch (error) {
    if (stopper.signal.aborted) written.finish = "stopped";
    else written.error = error.status ? error.message : `the server does not answer (${error.message})`;
    tell(written.error ?? "stopped", Boolean(written.error));
  }
  if (frame) cancelAnimationFrame(frame);
  stopper = undefined;
  setWriting(false);
  keep(own);
  if (own === conversation) redraw(written);
  byId("prompt").focus({ preventScroll: true });
}

function redraw(message) {
  const list = byId("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX;
  const made = drawMessage(message);
  made.classList.toggle("writing", stopper !== undefined);
  byId(message.id)?.replaceWith(made);
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function request() {
  const body = { model: byId("model").value, ...conversation.params };
  if (conversation.tools.trim()) body.tools = JSON.parse(conversation.tools);
  return body;
}

function setWriting(isWriting) {
  byId("send").hidden = isWriting;
  byId("stop").hidden = !isWriting;
  if (isWriting) tell("answering");
}

function send() {
  const content = byId("prompt").value;
  if (!(content.trim() || images.length) || stopper) return;
  byId("prompt").value = "";
  const message = { role: "user", content, ...(images.length && { images }) };
  images = [];
  drawImages();
  answer(conversation.add(conversation.path().at(-1)?.id, message));
}

// --- images of the next message --------------------------------------------------------------------------------------

function drawImages() {
  byId("images").hidden = !images.length;
  byId("images").replaceChildren(...images.map((url) => {
    const remove = () => { images = images.filter((each) => each !== url); drawImages(); byId("prompt").focus(); };
    return element("li", {}, picture(url), button("×", remove, { "aria-label": "remove the image" }));
  }));
}

// Add files that are images; return whether there was one.
function addImages(files) {
  const found = byId("attach").hidden ? [] : [...files].filter((file) => IMAGE_TYPES.includes(file.type));
  for (const file of found) {
    if (file.size > MAX_IMAGE_BYTES) {
      tell(`${file.name} is larger than ${MAX_IMAGE_BYTES >> 20} MiB`, true);
      continue;
    }
    const reader = new FileReader();
    reader.addEventListener("load", () => { images.push(reader.result); drawImages(); });
    reader.readAsDataURL(file);
  }
  return found.length > 0;
}

function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

// --- chats and settings ----------------------------------------------------------------------------------------------

function keep(chosen = conversation) {
  try {
    if (chosen.path().length) chosen.save();
  } catch {
    tell("this browser has no room for more chats; remove some", true);
  }
  drawChats();
}

function drawChats() {
  byId("chats").replaceChildren(...savedConversations().map((each) => {
    const isShown = each.id === conversation.id;
    const remove = button("×", () => { each.remove(); if (isShown) open(new Conversation()); else drawChats(); }, { class: "remove", "aria-label": `remove ${each.title}` });
    return element("li", {}, button(each.title, () => open(each), isShown ? { "aria-current": "true" } : {}), remove);
  }));
}

function open(chosen) {
  stopper?.abort();
  conversation = chosen;
  edited = undefined;
  byId("system").value = conversation.system;
  byId("tools").value = conversation.tools;
  for (const name of Object.keys(PARAMS)) byId(`param-${name}`).value = conversation.params[name] ?? "";
  drawChats();
  drawMessages();
  if (NARROW.matches) byId("chats-panel").open = false;
  byId("prompt").focus();
}

function drawParams() {
  for (const [name, { fallback, ...bounds }] of Object.entries(PARAMS)) {
    const input = element("input", { id: `param-${name}`, type: "number", placeholder: fallback, ...bounds });
    input.addEventListener("change", () => {
      delete conversation.params[name];
      if (input.value !== "") conversation.params[name] = Number(input.value);
      keep();
    });
    byId("params").append(element("label", { text: name.replaceAll("_", " ") }, input));
  }
}

async function askForModel() {
  try {
    const model = await ask("status");
    const chosen = byId("model").value;
    byId("model").replaceChildren(...model.models.map((name) => element("option", { value: name, text: name })));
    if (model.models.includes(chosen)) byId("model").value = chosen;
    for (const [name, value] of Object.entries(model.sampling)) {
      if (name in PARAMS) byId(`param-${name}`).placeholder = value;
    }
    byId("attach").hidden = !model.reads_images;
    document.querySelectorAll("[data-map]").forEach((each) => { each.hidden = !model.has_block_map; });
    document.title = `${model.models[0]} · Quire`;
    tell(model.problem ?? (model.generates ? "ready" : "this model gives embeddings, no text"), model.problem !== null || !model.generates);
  } catch (error) {
    if (error.status === 401) byId("settings-panel").open = true;
    tell(error.status === 401 ? "this server needs a key: see the settings" : error.status ? error.message : "the server does not answer", true);
  }
}

function download(text, suffix, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: `chat${suffix}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function checkTools() {
  conversation.tools = byId("tools").value;
  let problem = "";
  try {
    if (conversation.tools.trim() && !Array.isArray(JSON.parse(conversation.tools))) problem = "tools must be a JSON list";
  } catch (error) {
    problem = `tools are not JSON: ${error.message}`;
  }
  byId("tools").setCustomValidity(problem);
  if (problem) {
    conversation.tools = "";
    byId("tools").reportValidity();
  } else keep();
}

drawParams();
byId("key").value = apiKey();
byId("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("prompt").addEventListener("keydown", (event) => {
  if (isSend(event)) { event.preventDefault(); send(); }
});
byId("prompt").addEventListener("paste", (event) => {
  if (addImages(event.clipboardData.files)) event.preventDefault();
});
byId("form").addEventListener("dragover", (event) => event.preventDefault());
byId("form").addEventListener("drop", (event) => { event.preventDefault(); addImages(event.dataTransfer.files); });
byId("files").addEventListener("change", () => { addImages(byId("files").files); byId("files").value = ""; });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopper?.abort();
});
byId("stop").addEventListener("click", () => stopper?.abort());
byId("new").addEventListener("click", () => {
  const { system, params, tools } = conversation;
  open(new Conversation({ system, params: { ...params }, tools }));
});
byId("system").addEventListener("change", () => { conversation.system = byId("system").value; keep(); });
byId("tools").addEventListener("change", checkTools);
byId("key").addEventListener("change", () => { keepApiKey(byId("key").value.trim()); askForModel(); });
byId("defaults").addEventListener("click", () => {
  conversation.params = {};
  for (const name of Object.keys(PARAMS)) byId(`param-${name}`).value = "";
  keep();
});
byId("export-markdown").addEventListener("click", () => download(conversation.asMarkdown(), ".md", "text/markdown"));
byId("export-json").addEventListener("click", () => download(JSON.stringify(conversation, null, 2), ".json", "application/json"));
function fold() {
  byId("chats-panel").open = byId("settings-panel").open = !NARROW.matches;
}

NARROW.addEventListener("change", fold);
fold();
open(conversation);
askForModel();
