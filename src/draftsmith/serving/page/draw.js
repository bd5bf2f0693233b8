// Pictures of a step, as SVG that a strict Content-Security-Policy allows: attributes and classes, no styles in line.

const SVG = "http://www.w3.org/2000/svg";
const ROW = 26;
const LONGEST = 14;

/** Make an element of a picture. Text goes in as text, never as markup. */
function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A token as one can see it: spaces, line ends and emptiness have a sign, long ones are cut. */
export function visible(token) {
  const signs = String(token).replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
  const letters = Array.from(signs);
  if (letters.length === 0) return "∅";
  return letters.length > LONGEST ? `${letters.slice(0, LONGEST - 1).join("")}…` : signs;
}

/** Put a tree in order: {nodes: [{token, depth, row, parent, kept}], rows, depth}, or null where it makes no sense. */
export function arrange(tree) {
  const tokens = tree?.tokens;
  const parents = tree?.parents;
  if (!Array.isArray(tokens) || !Array.isArray(parents) || !tokens.length || parents.length !== tokens.length) return null;
  const kept = new Set(Array.isArray(tree.accepted) ? tree.accepted : []);
  const nodes = tokens.map((token, i) => ({ token, parent: parents[i], kept: kept.has(i), children: [], depth: 1, row: 0 }));
  const first = [];
  for (const [i, node] of nodes.entries()) {
    if (node.parent === -1) first.push(node);
    else if (Number.isInteger(node.parent) && node.parent >= 0 && node.parent < i) {
      node.depth = nodes[node.parent].depth + 1;
      nodes[node.parent].children.push(node);
    } else return null;
  }
  // A leaf takes the next row and a parent stands beside its first child, so that no edges cross.
  let rows = 0;
  const waiting = first.slice().reverse();
  while (waiting.length) {
    const node = waiting.pop();
    if (node.children.length) waiting.push(...node.children.slice().reverse());
    else node.row = rows++;
  }
  for (const node of nodes.slice().reverse()) if (node.children.length) node.row = node.children[0].row;
  return { nodes, rows, depth: Math.max(...nodes.map((node) => node.depth)) };
}

/** Draw the guesses of a step into `place`; returns a sentence that says the same. */
export function drawTree(place, step) {
  const found = arrange(step?.tree);
  if (found === null) {
    place.replaceChildren();
    const drafted = step?.drafted;
    if (drafted === 0) return "Nothing was guessed in this step: the token is the model's own.";
    return Number.isFinite(drafted)
      ? `${step.accepted ?? "?"} of ${drafted} guesses were accepted; the server sent no tree for this step.`
      : "The server sent no tree for this step.";
  }
  const widths = Array(found.depth + 1).fill(0);
  for (const node of found.nodes) widths[node.depth] = Math.max(widths[node.depth], Array.from(visible(node.token)).length);
  const left = [12];
  for (let depth = 1; depth <= found.depth; depth++) {
    left.push(depth === 1 ? 44 : left[depth - 1] + widths[depth - 1] * 8 + 62);
  }
  const width = left[found.depth] + widths[found.depth] * 8 + 34;
  const height = found.rows * ROW + 8;
  const picture = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const middle = (row) => row * ROW + ROW / 2 + 4;
  const right = (node) => left[node.depth] + Array.from(visible(node.token)).length * 8 + 28;
  const rootAt = found.nodes[0].row;
  for (const node of found.nodes) {
    const parent = node.parent === -1 ? null : found.nodes[node.parent];
    const [x, y] = parent === null ? [20, middle(rootAt)] : [right(parent), middle(parent.row)];
    const to = left[node.depth];
    const half = (x + to) / 2;
    const line = `M${x} ${y}C${half} ${y} ${half} ${middle(node.row)} ${to} ${middle(node.row)}`;
    picture.append(shape("path", { d: line, class: node.kept ? "edge kept" : "edge" }));
  }
  const root = shape("circle", { cx: 15, cy: middle(rootAt), r: 6, class: "node root" });
  root.append(shape("title", {}, "the newest token of the text"));
  picture.append(root);
  for (const node of found.nodes) {
    const group = shape("g", {});
    const size = right(node) - left[node.depth];
    group.append(shape("title", {}, `“${node.token}”, depth ${node.depth}, ${node.kept ? "accepted" : "rejected"}`));
    group.append(shape("rect", {
      x: left[node.depth], y: middle(node.row) - 10, width: size, height: 20, rx: 4, class: node.kept ? "node kept" : "node",
    }));
    const at = { x: left[node.depth] + 6, y: middle(node.row) + 4.5 };
    group.append(shape("text", node.kept ? at : { ...at, class: "dropped" }, `${node.kept ? "✓ " : "× "}${visible(node.token)}`));
    picture.append(group);
  }
  place.replaceChildren(picture);
  const path = found.nodes.filter((node) => node.kept);
  const said = path.map((node) => visible(node.token)).join(" ");
  return `${path.length} of ${found.nodes.length} guesses accepted (✓)${said ? `: ${said}` : ", all rejected (×)"}`;
}

/** Draw bars of shares between 0 and 1, one a depth, with the number written beside each. */
export function drawDepths(place, shares) {
  const height = shares.length * ROW + 4;
  const picture = shape("svg", { width: "100%", height, role: "img" });
  const said = shares.map((share, i) => `depth ${i + 1}: ${Math.round(100 * share)} %`).join(", ");
  picture.setAttribute("aria-label", `Share of steps that accepted a guess. ${said || "No guesses yet"}.`);
  shares.forEach((share, i) => {
    const y = i * ROW + 4;
    picture.append(shape("text", { x: 0, y: y + 14, class: "small" }, `depth ${i + 1}`));
    picture.append(shape("rect", { x: "16%", y, width: "68%", height: 18, rx: 2, class: "track" }));
    picture.append(shape("rect", { x: "16%", y, width: `${68 * share}%`, height: 18, rx: 2, class: "bar" }));
    picture.append(shape("text", { x: "86%", y: y + 14, class: "small" }, `${Math.round(100 * share)} %`));
  });
  place.replaceChildren(picture);
}
