// Markdown as elements. Text is only ever set as text: what a model writes is never HTML, and loads nothing.

import { copyButton, element } from "./dom.js";

const MAX_DEPTH = 12; // of quotes and lists inside of each other; deeper is plain text
const MAX_INLINE_CHARS = 20000; // of a paragraph; a longer one is plain text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp(
  [
    "\\\\([\\\\`*_{}\\[\\]()#+.!~|>-])", // 1: escaped
    "(?<!`)(`+)(?!`)([^]{1,2000}?)(?<!`)\\2(?!`)", // 2, 3: code
    "\\*\\*(?=\\S)([^]{1,2000}?)\\*\\*", // 4: bold
    "\\*(?=\\S)([^*]{1,2000}?)\\*", // 5: emphasis
    "(?<!\\w)__(?=\\S)([^]{1,2000}?)__(?!\\w)", // 6
    "(?<!\\w)_(?=\\S)([^_]{1,2000}?)_(?!\\w)", // 7
    "~~(?=\\S)([^]{1,2000}?)~~", // 8: struck out
    "!?\\[([^\\]]{0,1000})\\]\\(\\s*<?([^\\s)>]{1,2000})>?[^)]{0,200}\\)", // 9, 10: link
    "(https?://[^\\s<>()\\[\\]\"'`]{1,2000}(?<![.,;:!?]))", // 11: address
  ].join("|"),
  "g",
);

export function markdown(text) {
  const made = document.createDocumentFragment();
  made.append(...blocks(text.replaceAll("\r\n", "\n").split("\n"), 0));
  return made;
}

function blocks(lines, depth) {
  if (depth > MAX_DEPTH) return [element("p", { text: lines.join("\n") })];
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, depth);
    if (node) made.push(node);
    at = next;
  }
  return made;
}

// Return the block that begins at a line, null for an empty line, and the line behind it.
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (QUOTE.test(line)) {
    const end = endOf(lines, at, (each) => QUOTE.test(each));
    return [element("blockquote", {}, ...blocks(lines.slice(at, end).map((each) => each.replace(QUOTE, "")), depth + 1)), end];
  }
  if (ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return table(lines, at);
  const end = Math.max(at + 1, endOf(lines, at, (each) => each.trim() && !startsBlock(each)));
  return [element("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

function endOf(lines, at, isInside) {
  let end = at;
  while (end < lines.length && isInside(lines[end])) end += 1;
  return end;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

// A block of code; one that is not closed, since it is being written, goes to the end.
function code(lines, at, fence) {
  const isEnd = (line) => line.trim().startsWith(fence[1]) && !line.trim().replaceAll(fence[1][0], "");
  const end = endOf(lines, at + 1, (line) => !isEnd(line));
  const text = lines.slice(at + 1, end).join("\n");
  const head = element("div", { class: "code-head" }, element("span", { text: fence[2] }), copyButton(() => text));
  return [element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", { text }))), end + 1];
}

function list(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(marker);
  const items = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || item[1].length < indent.length || /\d/.test(item[2]) !== isOrdered) break;
    const width = item[1].length + item[2].length + 1;
    let end = at + 1;
    while (end < lines.length && isInItem(lines, end, width, indent.length)) end += 1;
    const inside = [item[4], ...lines.slice(at + 1, end).map((line) => line.slice(Math.min(width, indentOf(line))))];
    items.push(element("li", {}, ...tight(blocks(inside, depth + 1))));
    at = end;
    const next = endOf(lines, at, (line) => !line.trim());
    if (next < lines.length && ITEM.test(lines[next])) at = next;
  }
  const settings = isOrdered && parseInt(marker, 10) !== 1 ? { start: parseInt(marker, 10) } : {};
  return [element(isOrdered ? "ol" : "ul", settings, ...items), at];
}

// Return whether a line belongs to the item before it, of which the text begins at column `width`.
function isInItem(lines, number, width, indent) {
  const line = lines[number];
  if (!line.trim()) return indentOf(lines.slice(number).find((each) => each.trim()) ?? "") >= width;
  if (indentOf(line) >= width || (ITEM.test(line) && indentOf(line) > indent + 1)) return true;
  return lines[number - 1].trim() !== "" && !startsBlock(line);
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

// The one paragraph of an item needs no element of its own.
function tight(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function table(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const made = element("table", {}, element("thead", {}, row(lines[at], "th")), element("tbody", {}, ...body));
  return [element("div", { class: "wide-table", tabindex: "0" }, made), end];
}

function inline(text) {
  if (text.length > MAX_INLINE_CHARS) return [text];
  const made = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    made.push(...broken(text.slice(at, match.index)), span(match));
    at = match.index + match[0].length;
  }
  return [...made, ...broken(text.slice(at))];
}

function span(match) {
  if (match[1]) return match[1];
  if (match[2]) return element("code", { text: match[3].replace(/^ (.+) $/, "$1") });
  const bold = match[4] ?? match[6];
  if (bold) return element("strong", {}, ...inline(bold));
  const leaning = match[5] ?? match[7];
  if (leaning) return element("em", {}, ...inline(leaning));
  if (match[8]) return element("s", {}, ...inline(match[8]));
  return link(match[10] ?? match[11], match[9] || match[10] || match[11], match[0]);
}

// A link that a person must follow; an image is one, too. Any other kind of address remains text.
function link(address, text, source) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return source;
  return element("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank", text });
}

// A text with an element for each line break.
function broken(text) {
  return text.split("\n").flatMap((line, number) => (number ? [element("br"), line] : [line]));
}
