// Conversations: trees of messages, kept in this browser. Messages with the same parent are branches of each other.

const PREFIX = "quire-chat-"; // of names in localStorage
const ROOT = "root";
const MAX_TITLE_CHARS = 60;

export class Conversation {
  constructor(saved = {}) {
    this.id = saved.id ?? crypto.randomUUID?.() ?? String(Date.now() + Math.random());
    this.system = saved.system ?? "";
    this.params = saved.params ?? {};
    this.tools = saved.tools ?? "";
    this.messages = saved.messages ?? {};
    this.chosen = saved.chosen ?? {}; // by parent: the branch that is shown
    this.changed = saved.changed ?? Date.now();
  }

  get title() {
    const first = Object.values(this.messages).find((message) => message.role === "user");
    return first?.content.trim().slice(0, MAX_TITLE_CHARS) || "New chat";
  }

  add(parent, message) {
    const id = `m${Object.keys(this.messages).length + 1}`;
    this.messages[id] = { id, parent: parent ?? ROOT, ...message };
    this.chosen[parent ?? ROOT] = id;
    return this.messages[id];
  }

  // Return the messages of the branch that is shown.
  path() {
    const found = [];
    for (let id = this.chosen[ROOT]; id; id = this.chosen[id]) found.push(this.messages[id]);
    return found;
  }

  branches(message) {
    return Object.values(this.messages).filter((each) => each.parent === message.parent && each.role === message.role);
  }

  // Show the branch that is `step` behind a message's.
  turn(message, step) {
    const all = this.branches(message);
    const next = all[all.indexOf(message) + step];
    if (next) this.chosen[message.parent] = next.id;
  }

  // Return the body's messages up to one of the path, itself included.
  asked(last) {
    const path = this.path();
    const sent = path.slice(0, path.indexOf(last) + 1).map(asSent);
    return this.system.trim() ? [{ role: "system", content: this.system }, ...sent] : sent;
  }

  asMarkdown() {
    const parts = this.system.trim() ? [`**system**\n\n${this.system}`] : [];
    for (const message of this.path()) {
      const calls = (message.toolCalls ?? []).map((each) => `\n\n\`${each.function.name}(${each.function.arguments})\``);
      parts.push(`**${message.role}**\n\n${message.content}${calls.join("")}`);
    }
    return `${parts.join("\n\n---\n\n")}\n`;
  }

  save() {
    this.changed = Date.now();
    localStorage.setItem(PREFIX + this.id, JSON.stringify(this));
  }

  remove() {
    localStorage.removeItem(PREFIX + this.id);
  }
}

function asSent(message) {
  const sent = { role: message.role, content: message.content };
  if (message.images?.length) {
    const parts = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
    sent.content = message.content ? [...parts, { type: "text", text: message.content }] : parts;
  }
  if (message.toolCalls?.length) sent.tool_calls = message.toolCalls;
  if (message.toolCallId) sent.tool_call_id = message.toolCallId;
  return sent;
}

// Return all that are kept, the last one first. What cannot be read is left out.
export function savedConversations() {
  const found = [];
  for (const name of Object.keys(localStorage)) {
    if (!name.startsWith(PREFIX)) continue;
    try {
      found.push(new Conversation(JSON.parse(localStorage.getItem(name))));
    } catch {
      // another program's, or cut off: it stays where it is
    }
  }
  return found.sort((one, other) => other.changed - one.changed);
}
