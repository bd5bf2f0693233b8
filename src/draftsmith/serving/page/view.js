// What is shown of one text: its tokens by who wrote them, the legend, the numbers, and all that its steps tell.

import { drawDepths, drawTree } from "./draw.js";

const LOOKS = 6;
const REMEMBERED = 2000;
// Milliseconds between two drawings: a page that draws for every token takes the time of the machine that writes them.
const PACE = 120;

const byId = (id) => document.getElementById(id);

/** Make an element; text goes in as text, never as markup. */
export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Does a job soon after it was asked for, once for all that ask meanwhile. */
export class Paced {
  constructor(job) {
    this.job = job;
    this.timer = null;
  }

  ask() {
    this.timer ??= setTimeout(() => this.now(), PACE);
  }

  now() {
    clearTimeout(this.timer);
    this.timer = null;
    this.job();
  }
}

/** Fill a list of figures from [name, value] pairs; the first is the main one. Values that are null are left out. */
export function showFigures(place, pairs) {
  place.replaceChildren();
  for (const [name, value] of pairs) {
    if (value === null || value === undefined) continue;
    const pair = element("div", undefined, place.childElementCount === 0 ? "main" : "");
    pair.append(element("dt", name), element("dd", value));
    place.append(pair);
  }
}

export const number = (value, digits = 0) =>
  Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }) : null;

/** Which drafter looks how: the first to write gets the first look, the same on the whole page. */
class Looks {
  constructor(legend) {
    this.legend = legend;
    this.of = new Map();
  }

  clear() {
    this.of.clear();
    this.legend.replaceChildren();
  }

  entry(sample, said, className) {
    const entry = element("li");
    entry.append(element("span", sample, `sample ${className}`), ` ${said}`);
    this.legend.append(entry);
  }

  /** The classes of a token, or "" for one of the target's own. */
  classes(token) {
    const source = token?.source;
    if (!this.of.size && !this.legend.childElementCount) this.entry("word", "the model's own", "");
    if (typeof source !== "string" || source === "target") return "";
    if (!this.of.has(source)) {
      const look = `by by${(this.of.size % LOOKS) + 1}`;
      this.of.set(source, look);
      this.entry("word", `drafted by ${source}, stronger where deeper`, look);
    }
    return `${this.of.get(source)} deep${Math.min(4, Math.max(1, Number(token.depth) || 1))}`;
  }
}

export const looks = new Looks(byId("legend"));

/** The text of an answer as it arrives. */
export class Text {
  constructor(place) {
    this.place = place;
    this.coloured = "";
    this.plain = "";
    this.waiting = [];
    this.pace = new Paced(() => this.flush());
    place.replaceChildren();
    place.setAttribute("aria-busy", "true");
  }

  /** Add the tokens of a chunk, or its text where it has none. */
  add(chunk) {
    this.plain += chunk.text;
    if (chunk.tokens.length) for (const token of chunk.tokens) this.waiting.push(this.token(token));
    else if (chunk.text && !this.coloured) this.waiting.push(chunk.text);
    this.pace.ask();
  }

  token(token) {
    const text = String(token?.text ?? "");
    this.coloured += text;
    const look = looks.classes(token);
    const span = element("span", text, look);
    span.title = look ? `drafted by ${token.source}${token.depth ? `, depth ${token.depth}` : ""}` : "the model's own";
    return span;
  }

  flush() {
    const there = this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight < 40;
    this.place.append(...this.waiting);
    this.waiting = [];
    if (there) this.place.scrollTop = this.place.scrollHeight;
  }

  /** End: where tokens do not add up to the text that was sent, the text is what counts. */
  end() {
    this.pace.now();
    this.place.setAttribute("aria-busy", "false");
    if (!this.coloured || this.coloured === this.plain) return null;
    if (this.coloured.startsWith(this.plain)) return "Tokens behind the end of the text, such as a stop word, are shown too.";
    this.place.replaceChildren(this.plain);
    return "The tokens that were told do not add up to the text, so it is shown without colours.";
  }
}

const MOVES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };

/** Say in `line` who wrote a token of `place`: the one that was clicked, or that the arrow keys have come to. */
export function tellAuthors(place, line) {
  let told = null;
  const tell = (token) => {
    told?.classList.remove("told");
    told = token;
    told.classList.add("told");
    told.scrollIntoView({ block: "nearest" });
    line.textContent = `“${told.textContent.trim() || "white space"}”: ${told.title}.`;
  };
  place.addEventListener("click", (event) => {
    const token = event.target.closest("span");
    if (token) tell(token);
  });
  place.addEventListener("keydown", (event) => {
    const tokens = [...place.querySelectorAll("span")];
    const move = MOVES[event.key];
    if (move === undefined || !tokens.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const at = tokens.indexOf(told);
    tell(tokens[Math.min(tokens.length - 1, Math.max(0, at < 0 ? 0 : at + move))]);
  });
}

const planName = (plan) => (plan === null || plan === undefined ? "not told" : typeof plan === "string" ? plan : JSON.stringify(plan));

/** What the steps of a text tell: the tree of each, acceptance by depth, which plans were chosen and why. */
export class Steps {
  constructor(live) {
    this.live = live;
    this.pace = new Paced(() => { if (current === this) this.drawNow(); });
    this.all = [];
    this.count = 0;
    this.accepted = 0;
    this.reached = [];
    this.deepest = 0;
    this.plans = new Map();
    this.shown = null;
    byId("steps").hidden = true;
  }

  /** Take one step in. */
  add(step) {
    const path = Array.isArray(step.tree?.accepted) ? step.tree.accepted.length : 0;
    const accepted = Number.isFinite(step.accepted) ? step.accepted : path;
    this.all.push(step);
    if (this.all.length > REMEMBERED) this.all.shift();
    this.count += 1;
    this.accepted += accepted;
    for (let depth = 0; depth < accepted; depth++) this.reached[depth] = (this.reached[depth] ?? 0) + 1;
    this.deepest = Math.max(this.deepest, accepted, depthOf(step.tree));
    const name = planName(step.plan);
    const plan = this.plans.get(name) ?? { steps: 0, accepted: 0, why: "" };
    plan.steps += 1;
    plan.accepted += accepted;
    plan.why = step.why ?? plan.why;
    this.plans.set(name, plan);
    if (this.live) this.pace.ask();
  }

  /** Draw what there is in the end. */
  end() {
    this.pace.now();
  }

  get tokensPerStep() {
    return this.count ? 1 + this.accepted / this.count : null;
  }

  drawNow() {
    if (!this.all.length) return;
    byId("steps").hidden = false;
    const slider = byId("which-step");
    const before = this.count - this.all.length;
    slider.min = String(before + 1);
    slider.max = String(this.count);
    const at = Math.max(before + 1, this.shown ?? this.count);
    slider.value = String(at);
    byId("which-number").textContent = `${at} of ${this.count}`;
    const step = this.all[at - before - 1];
    byId("tree-caption").textContent = drawTree(byId("tree"), step);
    // What was chosen stands before it already.
    const why = step.why ? `: ${step.why.replace(/^(no draft|(chain|tree) of (up to )?\d+( with [\d.e+-]+ guess(es)? for each matched token)?): /, "")}` : "";
    const chosen = step.plan === "none" ? "not to draft" : `the plan ${planName(step.plan)}`;
    const known = step.plan !== null && step.plan !== undefined;
    byId("chose").textContent = known ? `The policy chose ${chosen}${why}.`.replace(/\.\.$/, ".") : "";
    const shares = Array.from({ length: this.deepest }, (_, depth) => (this.reached[depth] ?? 0) / this.count);
    drawDepths(byId("depths"), shares);
    const rows = [...this.plans].map(([name, plan]) => {
      const row = element("tr");
      const mean = number(1 + plan.accepted / plan.steps, 2);
      row.append(element("td", name), element("td", number(plan.steps)), element("td", mean), element("td", plan.why));
      return row;
    });
    byId("plans").tBodies[0].replaceChildren(...rows);
  }
}

function depthOf(tree) {
  if (!Array.isArray(tree?.parents)) return 0;
  const depths = [];
  for (const parent of tree.parents) depths.push(parent >= 0 ? (depths[parent] ?? 0) + 1 : 1);
  return Math.max(0, ...depths);
}

let current = null;

/** Begin to show the steps of another text: while they come, or in the end only. */
export function beginSteps(live) {
  current = new Steps(live);
  return current;
}

byId("which-step").addEventListener("input", (event) => {
  if (current === null) return;
  const at = Number(event.target.value);
  current.shown = at >= current.count ? null : at;
  current.drawNow();
});
