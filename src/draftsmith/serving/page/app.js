// The page: what was asked for, one text or a race of two, and what is said about them.

import { modelName, write } from "./stream.js";
import { Paced, Text, beginSteps, element, looks, number, showFigures, tellAuthors } from "./view.js";

const COMPARED = ["tokens a second", "tokens", "tokens a step"];
const byId = (id) => document.getElementById(id);
const state = { model: null, running: null, messages: [], answered: null };

/** Read the form; throws one sentence for what cannot be asked. */
function asked() {
  const prompt = byId("prompt").value;
  const mode = byId("form").elements.mode.value;
  const temperature = Number(byId("temperature").value || 0);
  const maxTokens = Number(byId("max-tokens").value);
  const seed = byId("seed").value === "" ? null : Number(byId("seed").value);
  if (!prompt.trim()) throw new Error("The prompt is empty; type something that the model can go on with.");
  if (!Number.isInteger(maxTokens) || maxTokens < 1) throw new Error("New tokens has to be a whole number above 0.");
  if (seed !== null && !Number.isSafeInteger(seed)) throw new Error("The seed has to be a whole number.");
  if (!Number.isFinite(temperature) || temperature < 0) throw new Error("The temperature has to be 0 or more.");
  const messages = [...state.messages, { role: "user", content: prompt }];
  return { mode, prompt, messages, temperature, maxTokens, seed, model: state.model, key: byId("key").value };
}

const say = (text) => { byId("said").textContent = text; };
const trouble = (text) => { byId("trouble").textContent = text; };

/** As the server tells it; where it does not, as tokens arrived here after the first. */
const speedOf = (result) => result.said ?? result.rate;

function figuresOf(result, steps) {
  return [
    ["tokens a second", number(speedOf(result), 1) ?? "–"],
    ["tokens", number(result.tokens)],
    ["wait for the first, ms", number(result.wait)],
    ["tokens a step", steps?.count ? number(steps.tokensPerStep, 2) : null],
    ["steps", steps?.count ? number(steps.count) : null],
    ["ended by", result.reason],
  ];
}

/** Write one text into `place` and its numbers beside it. */
async function show(what, place, figures, steps, only = null) {
  const text = new Text(place);
  let last = {};
  const pace = new Paced(() => showFigures(figures, [
    ["tokens a second", number(last.rate, 1) ?? "…"], ["tokens", last.seen ? number(last.seen) : null],
  ]));
  try {
    const result = await write(what, state.running.signal, (chunk) => {
      text.add(chunk);
      if (chunk.step && steps) steps.add(chunk.step);
      last = chunk;
      pace.ask();
    });
    pace.now();
    showFigures(figures, figuresOf(result, steps).filter(([name]) => !only || only.includes(name)));
    return { ...result, note: text.end() };
  } catch (error) {
    pace.now();
    text.end();
    throw error;
  } finally {
    steps?.end();
  }
}

/** Run a job with the buttons set for it; Stop and Esc end it. */
async function run(job) {
  if (state.running) return;
  trouble("");
  let what;
  try {
    what = asked();
  } catch (error) {
    trouble(error.message);
    return;
  }
  state.running = new AbortController();
  for (const id of ["write", "race", "forget"]) byId(id).disabled = true;
  byId("stop").disabled = false;
  looks.clear();
  try {
    if (state.model === null) what.model = await learnModel(state.running.signal);
    await job(what);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped. What had arrived stays.");
    else {
      state.running.abort(); // of two that run together, the other one too
      say("");
      trouble(error instanceof TypeError ? "The server cannot be reached, or its answer broke off." : error.message);
    }
  } finally {
    state.running = null;
    for (const id of ["write", "race", "forget"]) byId(id).disabled = false;
    byId("stop").disabled = true;
  }
}

async function writeOne(what) {
  byId("race-result").hidden = true;
  byId("answer").hidden = false;
  fileAnswer();
  say("Writing …");
  const result = await show(what, byId("text"), byId("figures"), beginSteps(true));
  if (what.mode === "chat") remember(what, result);
  const rate = number(speedOf(result), 1);
  say(["Done", rate ? `: ${rate} tokens a second.` : ".", result.note ? ` ${result.note}` : ""].join(""));
}

/** Keep a finished turn, so that the next one goes on from it. */
function remember(what, result) {
  state.messages = [...what.messages, { role: "assistant", content: result.text }];
  state.answered = result.text;
  addTurn("you", what.prompt);
  if (byId("prompt").value === what.prompt) byId("prompt").value = ""; // not what was typed meanwhile
  byId("forget").hidden = false;
}

function addTurn(who, text) {
  const turn = element("li");
  turn.append(element("b", who), text);
  byId("turns").append(turn);
}

/** Move the answer that is shown to the turns before, to make room for the next one. */
function fileAnswer() {
  if (state.answered !== null) addTurn("model", state.answered);
  state.answered = null;
}

async function race(what) {
  byId("race-result").hidden = false;
  byId("verdict").textContent = "";
  for (const id of ["plain-text", "drafted-text", "plain-figures", "drafted-figures", "text", "figures"]) byId(id).replaceChildren();
  byId("answer").hidden = true;
  const together = byId("together").checked;
  // Drawn texts can only be compared if both draw from the same seed.
  if (what.temperature > 0 && what.seed === null) what.seed = crypto.getRandomValues(new Uint32Array(1))[0];
  byId("race-note").textContent = together
    ? "Both run at the same time and share the machine, so both are slower than alone."
    : "One after the other, because they would share the machine: first without drafting, then with it. The prompt was "
      + "read once before, so that neither is the first to read it. Steps are drawn when both are done.";
  byId("race-result").scrollIntoView({ block: "start" });
  const lane = (name, plain, steps) => show({ ...what, plain }, byId(`${name}-text`), byId(`${name}-figures`), steps, COMPARED);
  const steps = beginSteps(false);
  say("Reading the prompt …");
  await write({ ...what, plain: true, maxTokens: 1 }, state.running.signal, () => {});
  let plain;
  let drafted;
  if (together) {
    say("Both are writing …");
    [plain, drafted] = await Promise.all([lane("plain", true, null), lane("drafted", false, steps)]);
  } else {
    say("Writing without drafting …");
    plain = await lane("plain", true, null);
    say("Writing with drafting …");
    drafted = await lane("drafted", false, steps);
  }
  byId("verdict").textContent = verdict(plain, drafted, what);
  say(`The race is over. ${byId("verdict").textContent}`);
}

/** Say who was faster, and whether the texts are equal; of unlike ones, where they part. */
export function verdict(plain, drafted, what) {
  const [slow, fast] = [speedOf(plain), speedOf(drafted)];
  const ratio = slow && fast && plain.tokens > 1 ? fast / slow : null;
  const speed = ratio === null ? "Too short to tell who was faster." : `With drafting: ${number(ratio, 2)} × as fast.`;
  if (plain.text === drafted.text) return `${speed} Both texts are equal.`;
  const one = Array.from(plain.text);
  const other = Array.from(drafted.text);
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  const why = what.temperature > 0
    ? " Where guesses are drawn, texts are distributed alike and need not be equal."
    : " Greedy texts ought to be: a tie that rounding broke another way, or a fault.";
  return `${speed} The texts differ from character ${at + 1} on.${why}`;
}

async function learnModel(signal) {
  const name = await modelName(byId("key").value, signal);
  state.model = name;
  byId("model").textContent = name === null ? "model: the server names none" : `model: ${name}`;
  return name;
}

function forget() {
  state.messages = [];
  state.answered = null;
  byId("turns").replaceChildren();
  byId("forget").hidden = true;
  byId("prompt").focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run(writeOne);
});
byId("race").addEventListener("click", () => run(race));
byId("stop").addEventListener("click", () => state.running?.abort());
byId("forget").addEventListener("click", forget);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run(writeOne);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
for (const id of ["text", "plain-text", "drafted-text"]) tellAuthors(byId(id), byId("who"));
learnModel().catch(() => { byId("model").textContent = "model: asked for when you write"; });
