// Charts over time of the steps that /debug/top has: one canvas, a slider into the past, and a moment's figures as text.

import { ask, byId, element, show } from "./dom.js";

const MOST_STEPS = 3600; // as many as the server keeps
const NUM_BINS = 150; // of the window that is shown
const PANEL = 66; // pixels of height, its title included
const TITLE = 20;

// A level is the value after the latest step, a rate a sum per second, a peak the largest value.
const SERIES = {
  used: { text: "blocks used", colour: "--accent", kind: "level" },
  cached: { text: "blocks cached", colour: "--cached", kind: "level" },
  free: { text: "blocks free", colour: "--free", kind: "level" },
  tokens: { text: "tokens/s computed", colour: "--cached", kind: "rate" },
  outputs: { text: "tokens/s of output", colour: "--accent", kind: "rate" },
  gap: { text: "longest gap, ms", colour: "--accent", kind: "peak" },
  waiting: { text: "requests waiting", colour: "--cached", kind: "level" },
  preempted: { text: "preemptions/s", colour: "--bad", kind: "rate" },
  hits: { text: "prompt tokens/s found", colour: "--accent", kind: "rate" },
};
const PANELS = [
  { title: "Blocks", series: ["used", "cached", "free"], isStacked: true },
  { title: "Tokens per second", series: ["tokens", "outputs"] },
  { title: "Gaps between tokens, ms", series: ["gap"] },
  { title: "Queue", series: ["waiting", "preempted"] },
  { title: "Prompt tokens found in the cache, per second", series: ["hits"] },
];

const words = (value) => value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 1 : 0 });

export class Charts {
  constructor(engine) {
    Object.assign(this, { engine, steps: [], next: 0, now: 0, askedAt: 0, span: 60, chosen: undefined, onChoose: () => {} });
    this.canvas = byId("chart");
    this.slider = byId("moment");
    this.figures = Object.fromEntries(Object.keys(SERIES).map((name) => [name, element("dd", { class: "figure" })]));
    byId("moment-figures").replaceChildren(...Object.entries(SERIES).flatMap(([name, { text, colour }]) => {
      const key = element("span", { class: "key" });
      key.style.background = `var(${colour})`;
      return [element("dt", {}, key, text), this.figures[name]];
    }));
    this.slider.addEventListener("input", () => this.choose(this.at(Number(this.slider.value))));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.point(event));
    byId("to-now").addEventListener("click", () => this.choose(undefined));
    byId("span").addEventListener("change", (event) => {
      this.span = Number(event.target.value);
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // Ask for the steps since the last answer, and draw. Where steps are for the operator alone, say so once.
  async refresh() {
    if (this.isRefused || this.isAsking) return;
    this.isAsking = true;
    try {
      let answer = await ask(`debug/top?since=${this.next}`);
      if (answer.next < this.next) { // the server was started again
        Object.assign(this, { steps: [], chosen: undefined });
        answer = await ask("debug/top?since=0");
      }
      this.add(answer);
    } catch (error) {
      if (error.status !== 403) throw error;
      this.isRefused = true;
      byId("charts-body").hidden = true;
      show("charts-hint", error.message);
    } finally {
      this.isAsking = false;
    }
  }

  add({ now, next, engines }) {
    Object.assign(this, { now, next, askedAt: Date.now() });
    const columns = Object.entries(engines[this.engine]?.steps ?? {});
    const numNew = columns.length ? columns[0][1].length : 0;
    for (let place = 0; place < numNew; place++) {
      const step = Object.fromEntries(columns.map(([name, values]) => [name, values[place]]));
      step.end = step.start + (step.seconds ?? 0);
      const before = this.steps.at(-1); // a gap: a sequence had a token in both steps, and ran between them
      step.gap = before?.outputs && before.rows && step.outputs ? 1000 * (step.end - before.end) : 0;
      this.steps.push(step);
    }
    this.steps.splice(0, this.steps.length - MOST_STEPS);
    this.draw();
  }

  choose(step) {
    this.chosen = step;
    this.draw();
    this.onChoose(step);
  }

  // Return a time of the server as words: how long ago it was, and when by this browser's clock.
  clock(time) {
    const ago = this.now - time;
    return `${words(ago)} s ago, at ${new Date(this.askedAt - 1000 * ago).toLocaleTimeString()}`;
  }

  // Return the last step up to a number; undefined past the last one: now.
  at(number) {
    return number >= this.next ? undefined : this.steps.findLast((step) => step.number <= number);
  }

  point(event) {
    const { left, width } = this.canvas.getBoundingClientRect();
    const time = this.start + ((event.clientX - left) / width) * this.span;
    this.choose(this.steps.findLast((step) => step.end <= time) ?? this.steps[0]);
  }

  // Sort the steps of the window into bins: for each series one value per bin.
  bins() {
    const length = this.span / NUM_BINS;
    const values = Object.fromEntries(Object.keys(SERIES).map((name) => [name, new Float64Array(NUM_BINS)]));
    let done = 0; // bins with known levels
    let last;
    const fill = (bin) => {
      for (; done < bin; done++) {
        for (const [name, { kind }] of Object.entries(SERIES)) {
          if (kind === "level") values[name][done] = last?.[name] ?? 0;
        }
      }
    };
    for (const step of this.steps) {
      const bin = Math.floor((step.end - this.start) / length);
      if (bin >= NUM_BINS) break;
      if (bin >= 0) {
        fill(bin);
        for (const [name, { kind }] of Object.entries(SERIES)) {
          if (kind === "rate") values[name][bin] += step[name] / length;
          if (kind === "peak") values[name][bin] = Math.max(values[name][bin], step[name]);
        }
      }
      last = step;
    }
    fill(NUM_BINS);
    return values;
  }

  draw() {
    const moment = this.chosen?.end ?? this.now;
    const end = this.chosen ? Math.min(this.now, moment + this.span / 2) : this.now;
    this.start = end - this.span;
    const values = this.bins();
    const bin = Math.max(0, Math.min(NUM_BINS - 1, Math.floor(((moment - this.start) / this.span) * NUM_BINS)));
    this.paint(values, (moment - this.start) / this.span);
    this.tell(values, bin, moment);
  }

  paint(values, cursor) {
    const [width, height, scale] = [this.canvas.clientWidth, PANEL * PANELS.length, devicePixelRatio];
    if (!width) return;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      Object.assign(this.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    }
    const style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name);
    const to = this.canvas.getContext("2d");
    to.setTransform(scale, 0, 0, scale, 0, 0);
    to.clearRect(0, 0, width, height);
    to.font = `12px ${style.fontFamily}`;
    PANELS.forEach(({ title, series, isStacked }, row) => {
      const [base, room] = [PANEL * (row + 1) - 1, PANEL - TITLE - 4];
      const heights = series.map((name) => values[name]);
      const tops = isStacked ? heights.map((_, layer) => heights[layer].map((_, bin) => sum(heights, layer, bin))) : heights;
      const whole = Math.max(1, ...tops.map((top) => Math.max(...top)));
      // Of a cache that is mostly free, the free blocks above the others are cut off.
      const most = isStacked ? Math.min(whole, Math.ceil(1.25 * Math.max(50, ...tops.at(-2)))) : whole;
      const order = series.map((_, layer) => (isStacked ? series.length - 1 - layer : layer));
      for (const layer of order) { // those in front last
        to.fillStyle = colour(SERIES[series[layer]].colour);
        to.beginPath();
        tops[layer].forEach((top, bin) => {
          const [left, right] = [(bin * width) / NUM_BINS, ((bin + 1) * width) / NUM_BINS];
          const high = Math.min(top / most, 1) * room;
          to.rect(left, base - high, right - left + 0.3, high);
        });
        to.fill();
      }
      to.fillStyle = colour("--line");
      to.fillRect(0, base, width, 1);
      to.fillStyle = colour("--soft");
      to.fillText(title, 0, base - room - 7);
      to.textAlign = "right";
      to.fillText(`top: ${words(most)}${most < whole ? ` of ${words(whole)}` : ""}`, width, base - room - 7);
      to.textAlign = "left";
    });
    to.fillStyle = colour("--ink");
    to.fillRect(Math.min(width - 1, Math.round(cursor * width)), 0, 1, height);
  }

  tell(values, bin, moment) {
    const step = this.chosen ?? this.steps.at(-1);
    const told = Object.entries(SERIES).map(([name, { text, kind }]) => { // a bin may have several steps
      const value = words(kind === "level" ? step?.[name] ?? 0 : values[name][bin]);
      if (this.figures[name].textContent !== value) this.figures[name].textContent = value;
      return `${text} ${value}`;
    });
    const when = this.chosen ? this.clock(moment) : "now";
    show("moment-when", when);
    show("moment-step", step ? `step ${step.number.toLocaleString("en-US")}: ${step.kind ?? "nothing computed"}, ` +
      `${step.rows} sequences${step.reason ? `, the next one waits for: ${step.reason}` : ""}` : "no step yet");
    byId("to-now").disabled = !this.chosen;
    Object.assign(this.slider, { min: this.steps[0]?.number ?? 0, max: this.next, value: this.chosen?.number ?? this.next });
    this.slider.setAttribute("aria-valuetext", `${when}: ${told.join(", ")}`);
  }
}

function sum(heights, layer, bin) {
  let total = 0;
  for (let below = 0; below <= layer; below++) total += heights[below][bin];
  return total;
}
