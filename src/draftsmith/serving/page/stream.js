// Asks the server for a text and hands on what it streams. Only ever speaks to the server that this page came from.

/** Read server-sent events from a response and call `take` with the data of each; say whether [DONE] came. */
export async function readEvents(body, take) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const lines = rest.split(/\r\n|\n|\r(?!$)/);
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) {
        data.push(line.slice(line[5] === " " ? 6 : 5));
      } else if (line === "" && data.length) {
        const whole = data.join("\n");
        data = [];
        if (whole === "[DONE]") return true;
        take(parsed(whole));
      }
    }
    if (done) {
      const whole = data.join("\n");
      if (data.length && whole !== "[DONE]") take(parsed(whole));
      return whole === "[DONE]";
    }
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Error("The server sent something that is no chunk of an answer.");
  }
}

/** The sentence of a server's error, whatever it looks like. */
function sentenceOf(error) {
  if (typeof error === "string") return error;
  return String(error?.message ?? error?.detail ?? "no reason given");
}

/** Turn an answer that is no success into an Error with one sentence. */
async function refusal(response) {
  let reason = "";
  try {
    const said = await response.json();
    reason = sentenceOf(said.error ?? said);
  } catch {
    reason = response.statusText || "no reason given";
  }
  if (response.status === 401 || response.status === 403) return new Error("The server wants another API key.");
  return new Error(`The server answered ${response.status}: ${reason}`);
}

function headersFor(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The name of the first model that the server has. */
export async function modelName(key, signal) {
  const response = await fetch("v1/models", { headers: headersFor(key), redirect: "error", signal });
  if (!response.ok) throw await refusal(response);
  const found = await response.json();
  return found?.data?.[0]?.id ?? null;
}

/**
 * Write one text. `on` is called with every chunk: {text, tokens, step, rate}; each may be absent or empty.
 * Returns {text, tokens, seconds, first, rate, reason}: `rate` counts the tokens after the first over their time.
 */
export async function write(asked, signal, on) {
  const chat = asked.mode === "chat";
  const body = {
    model: asked.model, stream: true, explain: true, stream_options: { include_usage: true },
    temperature: asked.temperature, max_tokens: asked.maxTokens,
  };
  if (asked.seed !== null) body.seed = asked.seed;
  if (asked.plain) body.speculation = { enabled: false };
  if (chat) body.messages = asked.messages;
  else body.prompt = asked.prompt;

  const started = performance.now();
  const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST", signal, redirect: "error", body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...headersFor(asked.key) },
  });
  if (!response.ok) throw await refusal(response);

  const found = { text: "", counted: null, seen: 0, first: null, last: null, atFirst: 0, reason: null, said: null };
  const ended = await readEvents(response.body, (chunk) => {
    if (chunk?.error) throw new Error(`The server gave up: ${sentenceOf(chunk.error)}`);
    const now = performance.now();
    const choice = chunk?.choices?.[0];
    const text = (chat ? choice?.delta?.content : choice?.text) ?? "";
    const told = chunk?.draftsmith ?? {};
    const tokens = Array.isArray(told.tokens) ? told.tokens : [];
    found.text += text;
    found.seen += tokens.length;
    if (text || tokens.length) {
      if (found.first === null) {
        found.first = now;
        found.atFirst = tokens.length || 1;
      }
      found.last = now;
    }
    if (choice?.finish_reason) found.reason = choice.finish_reason;
    if (Number.isFinite(chunk?.usage?.completion_tokens)) found.counted = chunk.usage.completion_tokens;
    if (Number.isFinite(told.tokens_per_second)) found.said = told.tokens_per_second;
    on({ text, tokens, step: told.step ?? null, rate: found.said, seen: found.seen });
  });

  if (!ended && found.reason === null) throw new Error("The answer broke off before its end.");
  const tokens = found.counted ?? (found.seen || null);
  const between = (found.last ?? 0) - (found.first ?? 0);
  const after = tokens === null ? 0 : tokens - found.atFirst;
  return {
    text: found.text, tokens, reason: found.reason, said: found.said,
    wait: found.first === null ? null : found.first - started,
    seconds: (performance.now() - started) / 1000,
    rate: after > 0 && between > 0 ? (1000 * after) / between : null,
  };
}
