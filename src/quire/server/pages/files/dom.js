// What the pages share: elements, colours, and questions to the server.
// Text from the server is only ever set as text, never as HTML: labels may come from anyone.

const GOLDEN_ANGLE = 137.508; // neighbours in number are far apart in colour

export function element(tag, settings = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name === "text") made.textContent = value;
    else if (name === "hue") paint(made, value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

export function show(id, value) {
  const text = typeof value === "number" ? value.toLocaleString("en-US") : value;
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

export function paint(target, holder) {
  target.style.setProperty("--hue", (holder * GOLDEN_ANGLE + 205) % 360);
  target.style.setProperty("--shade", ((holder % 3) - 1) * 0.09); // for those whose hues come close after all
}

export function tell(message, isBad = false) {
  show("status", message);
  byId("status").classList.toggle("bad", isBad);
}

const KEY = "quire-key"; // of localStorage: the API key that the user gave

export function apiKey() {
  return localStorage.getItem(KEY) ?? "";
}

export function keepApiKey(key) {
  if (key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
}

// Call a route by its path from the root of the server, with the user's key. A password in the page's address is not
// sent twice. Pages below debug/ were opened by a password dialog: the browser adds what was typed there.
export function call(path, settings = {}) {
  const url = new URL(`../${path}`, import.meta.url);
  url.username = url.password = "";
  const headers = { ...settings.headers };
  if (apiKey() && !path.startsWith("debug/")) headers.Authorization = `Bearer ${apiKey()}`;
  return fetch(url, { cache: "no-store", ...settings, headers });
}

// Return the JSON that a route answers. Throws the message of its error, with the status as `status`.
export async function ask(path, settings) {
  return answerOf(await call(path, settings));
}

export async function answerOf(response) {
  const answer = await response.json();
  if (response.ok) return answer;
  throw Object.assign(new Error(answer.error.message), { status: response.status });
}

// A button that copies a text, and says so.
export function copyButton(text) {
  const button = element("button", { type: "button", class: "small", text: "Copy" });
  button.addEventListener("click", async () => {
    await copy(text());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// Copy a text. Browsers have a clipboard for pages of this machine and of HTTPS alone; others copy what is selected.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { class: "visually-hidden" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
