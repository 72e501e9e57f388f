// The page draws the server's state as text, never as markup, and requests nothing else.
"use strict";

// ---- Drawing: h() describes nodes; patch() applies them to the existing ones, so focus and scroll position stay. ----

const SVG = new Set(["svg", "path", "rect", "line", "g"]);
// Invisible characters and ones that change the text direction are shown by their number.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;
const seen = (text) => String(text).replace(UNSEEN, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
const flat = (text) => seen(text).replace(/[\t\n]/g, (c) => (c === "\n" ? "\\n" : "\\t"));

const some = (kids) => kids.flat(Infinity).filter((k) => k !== null && k !== undefined && k !== false && k !== "");
const h = (tag, props, ...kids) => ({ tag, props: props || {}, kids: some(kids) });

function fits(el, node) {
  if (typeof node !== "object") return el.nodeType === 3;
  return el.nodeType === 1 && el.__props && el.localName === node.tag && el.__key === node.props.key;
}

function make(node) {
  if (typeof node !== "object") return document.createTextNode(flat(node));
  const el = SVG.has(node.tag) ? document.createElementNS("http://www.w3.org/2000/svg", node.tag) : document.createElement(node.tag);
  el.__key = node.props.key;
  el.__props = {};
  lay(el, node);
  return el;
}

function lay(el, node) {
  if (typeof node !== "object") {
    const text = flat(node);
    if (el.data !== text) el.data = text;
    return;
  }
  const props = node.props;
  for (const name of new Set([...Object.keys(el.__props), ...Object.keys(props)])) {
    const value = props[name];
    if (name === "key" || value === el.__props[name]) continue;
    if (name.startsWith("on")) el[name.toLowerCase()] = value || null;
    else if (name === "pre") el.textContent = seen(value);
    else if (name === "start") { if (!(name in el.__props)) el.value = value; }
    else if (value === undefined || value === null || value === false) el.removeAttribute(name);
    else el.setAttribute(name, value === true ? "" : flat(value));
  }
  el.__props = props;
  if (!("pre" in props)) patch(el, node.kids);
}

function patch(parent, kids) {
  const keyed = new Map();
  for (const el of parent.childNodes) if (el.__key !== undefined) keyed.set(el.__key, el);
  let at = parent.firstChild;
  for (const node of some(kids)) {
    const key = typeof node === "object" ? node.props.key : undefined;
    let el = key !== undefined ? keyed.get(key) : at;
    if (el && !fits(el, node)) el = undefined;
    if (!el) parent.insertBefore(make(node), at);
    else {
      if (el === at) at = at.nextSibling;
      else parent.insertBefore(el, at);
      lay(el, node);
    }
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

// ---- Numbers as text. ----

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
function count(n) {
  if (n === null || n === undefined) return "–";
  if (Math.abs(n) >= 1e4) return compact.format(n);
  return n >= 100 ? Math.round(n).toLocaleString("en") : String(Number(n.toPrecision(2)));
}
const UNITS = [[1, 1e-3, "ms"], [120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"], [Infinity, 86400, "d"]];
function span(s) {
  if (s === null || s === undefined) return "–";
  const [, unit, name] = UNITS.find(([end]) => s < end);
  return `${s / unit < 10 ? Number((s / unit).toPrecision(2)) : Math.round(s / unit)} ${name}`;
}
const many = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const place = (item) => (item.partition === undefined || item.partition < 0 ? item.topic : `${item.topic}:${item.partition}`);

// ---- The state, and its requests. ----

const known = { state: null, history: {}, route: {}, filter: "", hover: null, at: 0, link: "waiting" };
let following = null;

// toWellFormed: encodeURIComponent raises on lone surrogates.
const address = (...parts) => "#/" + parts.filter((part) => part !== undefined).map((part) => encodeURIComponent(part.toWellFormed())).join("/");
function readRoute() {
  const decode = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
  const [group, member] = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decode);
  return { group, member };
}
// Requests the next state after the known one while this view is open (long polling: the server answers when there is one).
// The server answers within 12 s. A connection may be lost without a sign, for example by a sleeping machine: then it asks again.
async function follow() {
  const own = (following = new AbortController());
  const query = new URLSearchParams(Object.entries(known.route).filter(([, name]) => name !== undefined));
  while (following === own) {
    let reply = null;
    try {
      const answer = await fetch("api/groups?" + query, { signal: AbortSignal.any([own.signal, AbortSignal.timeout(15000)]) });
      if (answer.ok) reply = await answer.json();
    } catch { /* no answer: the page shows it */ }
    if (following !== own) return;
    if (reply) {
      query.set("after", reply.made);
      Object.assign(known, { state: reply, history: reply.history || known.history, at: Date.now(), link: "live" });
    } else {
      query.delete("after");
      known.link = "lost";
      await new Promise((again) => setTimeout(again, 1000));
    }
    draw();
  }
}
function unfollow() {
  if (following) following.abort();
  following = null;
}
function go() {
  Object.assign(known, { route: readRoute(), state: null, history: {}, filter: "", hover: null });
  const field = document.getElementById("filter");
  if (field) field.value = "";
  unfollow();
  follow();
  draw();
  scrollTo(0, 0);
}
const lagText = (lag) => (lag === null ? "unknown" : count(lag));
const sum = (list, name) => list.reduce((all, item) => all + (item[name] || 0), 0);
const matches = (...parts) => !known.filter || parts.flat().join(" ").toLowerCase().includes(known.filter);

// ---- Parts of the page. ----

const pill = (level, text) => h("span", { class: "pill " + level }, h("span", { class: "dot " + level }), text);
function levelOf(summary) {
  if (summary.bad || summary.silent) return ["bad", summary.bad ? many(summary.bad, "problem") : `${summary.silent} silent`];
  if (summary.warn) return ["warn", `${summary.warn} to look at`];
  return summary.living ? ["ok", "moving"] : ["", "no member"];
}
const tile = (name, value, small, level) =>
  h("div", { class: "tile " + (level || "") }, h("dt", null, name), h("dd", null, value, small && h("small", null, small)));
const card = (key, title, small, ...kids) =>
  h("section", { class: "card", key, "aria-label": title }, h("header", null, h("h2", null, title, small && h("small", null, small))), ...kids);
// A column of a table: its title, and the cell of a row. On a phone a number is below its title.
const num = (title, of, write = count) => ({ title, kind: "num", cell: (row) => h("td", { class: "num" + (of(row) ? "" : " zero"), "data-label": title.toLowerCase() }, write(of(row), row)) });
const text = (title, of, kind = "text") => ({ title, kind: "", cell: (row) => h("td", { class: kind }, of(row)) });
const table = (rows, key, columns, kind = () => "") =>
  h("div", { class: "scroll" }, h("table", { class: "cards" },
    h("thead", null, h("tr", null, columns.map((column) => h("th", { class: column.kind, scope: "col" }, column.title)))),
    h("tbody", null, rows.map((row) => h("tr", { key: key(row), class: kind(row) }, columns.map((column) => column.cell(row)))))));

// The runs of known points, each as the corners of its line; the last point is at the right.
function runs(points, width, height, most) {
  const found = [];
  points.forEach((value, number) => {
    if (value === null) return;
    if (!number || points[number - 1] === null) found.push([]);
    found.at(-1).push([width - (points.length - 1 - number), (height - (most ? (value / most) * (height - 3) : 0) - 1).toFixed(1)]);
  });
  return found;
}
const corners = (run) => run.map(([x, y]) => `${x} ${y}`).join("L");
const line = (found, kind) => h("path", { class: "line " + kind, d: found.map((run) => `M${corners(run)}h.01`).join("") });
const area = (found, height) => h("path", { class: "area", d: found.map((run) => `M${run[0][0]} ${height}L${corners(run)}L${run.at(-1)[0]} ${height}Z`).join("") });
function spark(points, label) {
  const reported = (points || []).filter((point) => point !== null);
  if (reported.length < 2) return h("span", { class: "dim" }, "");
  const most = Math.max(...reported, 1e-9), w = Math.max(12, points.length);
  const found = runs(points, w, 24, most);
  return h("svg", { class: "spark", viewBox: `0 0 ${w} 24`, preserveAspectRatio: "none", role: "img", "aria-label": label }, area(found, 24), line(found, ""));
}
function chart(key, title, show, series, dots) {
  const longest = Math.max(...series.map(([, points]) => (points || []).length), 1);
  // A short history uses the whole width.
  const step = known.history.step || 5, width = Math.max(24, longest), height = 66;
  const reported = series.flatMap(([, points]) => points || []).filter((point) => point !== null);
  const most = Math.max(...reported, 0);
  const back = known.hover && known.hover.key === key ? known.hover.back : null;
  const valueOf = (points) => {
    if (!points || !points.length) return null;
    if (back !== null) return points[points.length - 1 - back] ?? null;
    for (let at = points.length - 1; at >= Math.max(0, points.length - (dots ? 360 : 3)); at--) if (points[at] !== null) return points[at];
    return null;
  };
  const shown = series.map(([name, points, kind]) => h("span", null, series.length > 1 && h("span", { class: "of " + kind }, name + " "), h("b", null, show(valueOf(points))), " "));
  const over = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const at = Math.round((1 - (event.clientX - box.left) / box.width) * (width - 1));
    known.hover = { key, back: Math.min(Math.max(0, at), longest - 1) };
    draw();
  };
  const out = () => { known.hover = null; draw(); };
  const x = back === null ? null : width - back;
  return h("div", { class: "card chart", key },
    h("div", { class: "title" }, h("h2", null, title), h("span", null, shown)),
    h("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", onPointerMove: over, onPointerLeave: out,
      "aria-label": `${title}, the last half hour: now ${series.map(([name, points]) => name + " " + show(valueOf(points))).join(", ")}; highest ${show(reported.length ? most : null)}` },
      h("line", { class: "grid", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 }),
      h("line", { class: "grid", x1: 0, x2: width, y1: 2, y2: 2 }),
      series.length === 1 && !dots && area(runs(series[0][1] || [], width, height, most), height),
      series.map(([, points, kind]) => dots ? line(runs(points || [], width, height, most).flat().map((at) => [at]), "dots") : line(runs(points || [], width, height, most), kind)),
      x !== null && h("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: height })),
    h("div", { class: "axis" }, h("span", null, span((back === null ? width : back) * step) + " ago"), h("span", null, reported.length ? "highest " + show(most) : "nothing yet"), h("span", null, "now")));
}

function problemItem(problem, group, number) {
  const more = [];
  if (problem.count > 1) more.push(`${problem.count} times`);
  if (problem.waiting) more.push(`lag ${count(problem.waiting)}`);
  if (problem.member && problem.kind !== "silent") more.push(problem.member);
  if (problem.key_hash) more.push("key " + problem.key_hash);
  const title = group ? h("a", { href: address(group) }, problem.title) : problem.title;
  const level = { bad: "bad", warn: "to look at", note: "note" }[problem.level];
  return h("li", { class: problem.level, key: [group, problem.kind, problem.title, number].join("|") },
    h("div", { class: "what" },
      h("b", null, h("span", { class: "dot " + problem.level, role: "img", "aria-label": level }), title),
      group && h("span", { class: "group" }, "in " + group),
      problem.age !== undefined && h("span", { class: "dim" }, "for " + span(problem.age))),
    h("div", { class: "why" }, problem.text),
    h("div", { class: "more" }, more.map((text) => h("span", null, text)),
      !group && problem.topic && h("button", { class: "act", onClick: () => openDetails(problem, problem.title) }, "Details"),
      !group && actionsOf(problem)));
}

function overview(state) {
  const groups = state.groups, total = (name) => groups.reduce((all, row) => all + (row[name] || 0), 0);
  const problems = groups.flatMap((group) => group.problems.map((row) => [row, group.name]));
  problems.sort(([a], [b]) => "bad warn note".indexOf(a.level) - "bad warn note".indexOf(b.level) || (b.age || 0) - (a.age || 0));
  const shown = groups.filter((row) => matches(row.name, row.problems.map((p) => p.title + p.text)));
  const wanted = problems.filter(([row, group]) => row.level !== "note" && matches(group, row.title, row.text)).slice(0, 8);
  const columns = [
    text("Group", (row) => h("a", { href: address(row.name) }, row.name), "name"), text("State", (row) => pill(...levelOf(row)), "state"),
    num("Members", (row) => row.living, (living, row) => (row.silent ? `${living} + ${row.silent} silent` : count(living))), num("Partitions", (row) => row.partition_count),
    num("Lag", (row) => row.lag, lagText), num("Messages/s", (row) => row.rate),
    text("30 min", (row) => spark((known.history.handled || {})[row.name], `messages a second of ${row.name}, the last half hour`), ""),
    num("In flight", (row) => row.in_flight), num("Parked", (row) => row.parked_keys), num("Dead letters", (row) => row.dead_letters), num("Pending", (row) => row.pending),
    text("First cause", (row) => row.problems.length > 0 && row.problems[0].title, "text dim")];
  return [
    h("div", { class: "head" }, h("h1", null, state.of === "this process" ? "This process" : "All groups"), h("span", { class: "dim" }, state.of === "this process" ? "" : "as they report to " + state.of)),
    h("dl", { class: "tiles" },
      tile("Groups", count(state.count)), tile("Members", count(total("living")), total("silent") ? `${total("silent")} silent` : "", total("silent") ? "bad" : ""),
      tile("Lag", lagText(groups.some((row) => row.lag === null) ? null : total("lag"))), tile("Messages/s", count(total("rate"))), tile("In flight", count(total("in_flight"))),
      tile("Problems", count(total("bad")), total("warn") ? `${total("warn")} to look at` : "", total("bad") ? "bad" : total("warn") ? "warn" : "")),
    wanted.length > 0 && card("look", "What needs a look", "", h("ul", { class: "problems" }, wanted.map(([row, group], number) => problemItem(row, group, number)))),
    card("groups", "Groups", shown.length < state.count ? `${shown.length} of ${state.count}` : "",
      shown.length ? table(shown, (row) => row.name, columns)
        : h("p", { class: "empty" }, state.count ? "No group matches the filter." : "No member reports. Start apps with `penstock run --report` or App(report=True).")),
  ];
}

function lanes(list) {
  const classes = [0.1, 1, 5, 30, 120];
  const heat = (age) => classes.filter((limit) => age >= limit).length;
  const strips = list.map((lane) => {
    const depth = lane.depth.reduce((sum, each) => sum + each, 0), oldest = Math.max(0, ...lane.age), most = Math.max(...lane.depth, 1), n = lane.depth.length;
    const tall = (deep) => 44 * (0.12 + 0.88 * Math.log1p(deep) / Math.log1p(most));
    return h("div", { class: "lane", key: lane.handler },
      h("div", { class: "title" }, h("b", null, lane.handler), h("span", { class: "dim" }, `${many(depth, "message")}, the deepest ${count(most)}, the oldest ${span(oldest)}`)),
      h("svg", { viewBox: `0 0 ${n * 10} 44`, preserveAspectRatio: "none", role: "img", "aria-label": `lanes of ${lane.handler}: ${many(depth, "message")}, the oldest ${span(oldest)}` },
        lane.depth.map((deep, at) => [
          h("rect", { class: "track", x: at * 10, y: 0, width: 9, height: 44 }),
          deep > 0 && h("rect", { class: "heat" + heat(lane.age[at]), x: at * 10, width: 9, y: 44 - tall(deep), height: tall(deep) }),
        ])));
  });
  const words = ["< 0.1 s", "0.1 s", "1 s", "5 s", "30 s", "2 min"];
  return card("lanes", "Lanes", "height: messages, colour: age of the oldest",
    h("div", { class: "body lanes" }, strips.length ? strips : h("p", { class: "empty" }, "Nothing waits in any lane."),
      strips.length > 0 && h("div", { class: "legend" }, words.map((word, n) => h("span", null, h("svg", { viewBox: "0 0 10 10" }, h("rect", { class: "heat" + n, width: 10, height: 10 })), word)))));
}

const rowlink = (item, title) => h("button", { class: "rowlink", onClick: () => openDetails(item) }, title);
const none = (title) => h("p", { class: "empty" }, title);
function partitions(group) {
  const shown = group.partitions.filter((row) => matches(place(row), row.member, row.state, row.holds)), all = group.partition_count;
  const most = Math.max(1, ...shown.map((row) => row.lag || 0)), width = (lag) => (96 * (lag || 0)) / most;
  const bar = (lag) => h("svg", { class: "spark", viewBox: "0 0 96 3", "aria-hidden": "true" },
    h("rect", { class: "heat2", x: 96 - width(lag), width: width(lag), height: 3 }));
  const isBad = (row) => row.trouble || row.state === "dead letter" || row.state === "held";
  const isIdle = (row) => row.blocking_offset === undefined && !row.paused;
  const columns = [
    text("Partition", (row) => [rowlink(row, place(row)), known.route.member === undefined && h("small", null, row.member)], "name"),
    num("Lag", (row) => row.lag, (lag) => [count(lag), lag !== undefined && bar(lag)]),
    num("Watermark", (row) => row.watermark ?? -1, (at) => (at < 0 ? "–" : String(at))),
    num("Gaps", (row) => row.gaps), num("In flight", (row) => row.in_flight), num("Parked", (row) => row.parked),
    text("What holds it", (row) => h("span", { class: isBad(row) ? "text bad-text" : isIdle(row) ? "text dim" : "text" }, row.holds))];
  return card("partitions", "Partitions", shown.length < all ? `the ${shown.length} that most need a look, of ${count(all)}` : count(all),
    shown.length ? table(shown, (row) => row.member + place(row), columns) : none("None."));
}
function members(group) {
  const shown = group.members.filter((row) => matches(row.member, row.host)), all = group.member_count;
  const state = (row) => row.silent
    ? pill(row.replaced ? "" : "bad", (row.replaced ? "replaced, " : "") + `silent for ${span(row.age)}`) : pill("ok", "reports");
  const name = (row) => [h("a", { href: address(group.name, row.member) }, row.member), h("small", null, `process ${row.process} on ${row.host}`)];
  const columns = [
    text("Member", name, "name"), text("State", state, "state"), num("Partitions", (row) => row.partition_count),
    num("Lag", (row) => row.lag, lagText), num("Messages/s", (row) => row.rate), num("Failed/s", (row) => row.failed_rate),
    num("In flight", (row) => row.in_flight),
    num("Workers busy", (row) => row.busy, (busy, row) => (row.workers === null ? "–" : `${busy} of ${row.workers}`)),
    num("Parked", (row) => row.parked_keys), num("Up", (row) => row.uptime, span)];
  if (can("stacks")) columns.push(text("", (row) => row.commands && action("Stacks", "stacks", { group: group.name, member: row.member })));
  return card("members", "Members", shown.length < all ? `${shown.length} of ${all}` : count(all),
    table(shown, (row) => row.member, columns, (row) => (row.silent ? "silent" : "")));
}
function parked(group) {
  const shown = group.parked.filter((row) => matches(place(row), row.handler, row.key_hash));
  const columns = [
    text("Head", (row) => rowlink(row, `${place(row)}@${row.offset}`), "name"),
    text("Handler", (row) => row.handler, ""), text("State", (row) => row.state, ""),
    num("Tries", (row) => row.attempt), num("Since", (row) => row.age, span),
    num("Next try", (row) => row.due_in, (due) => (due === undefined ? "not set" : "in " + span(due)))];
  return card("parked", "Parked keys", count(group.parked_keys),
    group.parked.length ? table(shown, (row) => place(row) + row.offset, columns) : none("None."));
}
function deadLetters(group) {
  const origin = (age, row) => row.offset === null ? span(age) + " ago"
    : [rowlink(row, `${place(row)}@${row.offset}`), h("small", { class: "dim" }, ` ${span(age)} ago`)];
  const fields = [["partition", "Partition", "number"], ["offset", "Offset", "number"]];
  const columns = [
    text("Reason", (row) => [row.error, h("small", null, `${row.topic} → ${row.dead_letter_topic}`)], "name"),
    num("Messages", (row) => row.count), num("Last", (row) => row.age, origin)];
  if (can("replay")) columns.push(text("", (row) => action("Replay …", "replay", { topic: row.dead_letter_topic }, fields)));
  return card("letters", "Dead letters", many(sum(group.dead_letters, "count"), "message") + " since the members' start",
    group.dead_letters.length ? table(group.dead_letters.filter((row) => matches(row.topic, row.dead_letter_topic, row.error)), (row) => [row.topic, row.dead_letter_topic, row.error].join("|"), columns)
      : none("None since the members' start."));
}
function pauses(group) {
  const now = Object.entries(group.paused), before = Object.entries(group.pauses);
  return card("pauses", "Pauses", now.length ? "" : "none now", h("div", { class: "body" },
    now.map(([why, n]) => h("p", { key: "n" + why }, h("b", null, many(n, "partition")), " now: ", why)),
    before.length > 0 && h("p", { class: "dim", key: "before" }, "since the start: " + before.map(([why, n]) => `${why} ${count(n)}`).join(", ")),
    !now.length && !before.length && h("p", { class: "dim" }, "No partition was paused.")));
}
function transactions(group) {
  const counts = group.coordinators.map((row) => row.counts), total = (name) => count(sum(counts, name));
  const oldest = Math.max(0, ...counts.map((row) => row.oldest_pending_age || 0));
  const prefix = ["prefix", "Prefix of the store", "text", "penstock"], id = ["transaction_id", "Transaction", "text"];
  const resume = (target) => action("Resume a discarded one …", "resume-transaction", target, target.group ? [id] : [prefix, id]);
  const columns = [
    text("Transaction", (row) => row.id, "name mono"), text("Producer group", (row) => row.group), text("Topics", (row) => row.topics),
    num("Age", (row) => row.age, span), num("Checks", (row) => row.checks),
    text("Waits for", (row) => row.waits_for || "the decision of its producer")];
  if (can("settle")) columns.push(text("", settle));
  return card("transactions", "Transactions", `${total("pending")} pending, the oldest ${span(oldest)}`,
    h("div", { class: "body dim" }, `${total("committed")} committed, ${total("rolled_back")} rolled back, ${total("discarded")} discarded, `
      + `${total("checks")} checks, ${total("no_producer")} of which reached no producer`,
      resumers(group).map((target) => h("span", { key: target.member || "" }, " ", resume(target)))),
    group.transactions.length > 0 && table(group.transactions.filter((row) => matches(row.id, row.group, row.topics, row.waits_for)), (row) => row.id, columns));
}
// The process that settles: any with permission for a store in Kafka ({}), else the coordinator if it receives commands; null: none.
function operated(operator) {
  const of = operator || {};
  return (of.store || "kafka") === "kafka" ? {} : of.group ? { group: of.group, member: of.member } : null;
}
function settle(transaction) {
  const by = operated(transaction.operator);
  if (!by) return by;
  const target = by.group ? by : { prefix: transaction.prefix };
  return action("Settle …", "settle", { ...target, transaction_id: transaction.id }, [["decision", "Decision", "select", ["rollback", "commit", "discard"]]]);
}
function resumers(group) {
  const found = group.coordinators.map((coordinator) => operated(coordinator.operator)).filter(Boolean);
  return found.filter((operator) => operator.group).concat(found.filter((operator) => !operator.group).slice(0, 1));
}
function sinks(group) {
  const past = Object.entries(known.history.series || {}).filter(([name]) => name.startsWith("batch "));
  const state = (row) => pill(["running", "standby"].includes(row.state) ? "ok" : row.state === "failed" ? "bad" : "warn", row.state);
  const columns = [
    text("Query", (row) => row.name, "name"), text("State", state, ""), num("Batch", (row) => row.batch_id, (id) => String(id ?? "–")),
    num("Rows", (row) => row.rows), num("Rows/s", (row) => row.rows_per_s), num("Last batch took", (row) => row.batch_seconds, span),
    num("Lag", (row) => row.lag), num("Restarts", (row) => row.restarts), text("Last error", (row) => row.last_error)];
  return [card("sinks", "Spark queries", "", table(group.sinks.filter((row) => matches(row.name, row.state, row.member)), (row) => row.name + row.member, columns)),
    past.length > 0 && h("div", { class: "charts", key: "sinkcharts" },
      past.map(([name, points]) => chart(name, `Batches of ${name.slice(6)}`, span, [["", points, ""]], true)))];
}

function absent(name, member) {
  const text = member === undefined ? "No member of this group reports now." : "This member does not report now.";
  return [h("div", { class: "head" }, h("h1", null, member || name)), h("p", { class: "empty" }, text),
    h("p", null, h("a", { href: member === undefined ? "#/" : address(name) }, "Back"))];
}
// The figures at the top. A process may have only Spark queries or a coordinator: then it shows no consumer figures.
function tiles(group, consumes, isMember) {
  const all = (name) => count(sum(group.coordinators.map((row) => row.counts), name)), latency = (name) => ((known.history.series || {})[name] || []).at(-1);
  const p99 = latency("p99"), sinkLag = group.sinks.some((row) => row.lag === undefined) ? null : sum(group.sinks, "lag");
  const refused = group.dead_letter_failures, { held_keys: held, silent } = group;
  return h("dl", { class: "tiles", key: "tiles" },
    !consumes && group.sinks.length > 0 && [tile("Rows/s", count(sum(group.sinks, "rows_per_s"))), tile("Lag", lagText(sinkLag))],
    !consumes && group.coordinators.length > 0 && [tile("Published/s", count(group.rate)), tile("Pending", all("pending")), tile("Held", all("held"))],
    consumes && [
      tile("Messages/s", count(group.rate), group.failed_rate ? `${count(group.failed_rate)} failed` : ""),
      tile("Lag", lagText(group.lag)), tile("In flight", count(group.in_flight)),
      tile("Done within", span(latency("p50")), p99 === undefined || p99 === null ? "" : `99 % ${span(p99)}`),
      tile("Parked keys", count(group.parked_keys), held ? `${held} held` : "", held ? "bad" : ""),
      tile("Dead letters", count(sum(group.dead_letters, "count")), refused ? `${count(refused)} refused` : "", refused ? "warn" : "")],
    !isMember && tile("Members", count(group.living), silent ? `${silent} silent` : "", silent ? "bad" : ""));
}
function groupPage(state) {
  const group = state.group, { group: name, member } = known.route, isMember = member !== undefined;
  if (!group || (isMember && !group.members.length)) return absent(name, member);
  const series = known.history.series || {}, of = (level) => group.problems.filter((problem) => problem.level === level).length;
  const [level, word] = levelOf({ ...group, bad: of("bad"), warn: of("warn") });
  const topics = [...new Set(group.partitions.map((row) => row.topic))], topic = [["topic", "Topic", "select", topics]];
  const target = isMember ? { group: name, member } : { group: name };
  const consumes = group.partition_count > 0 || group.partitions.length > 0 || (!group.sinks.length && !group.coordinators.length);
  const problems = group.problems.filter((problem) => matches(problem.title, problem.text, problem.member));
  const offsets = [["to", "To: earliest, latest, a time, an offset, +N or -N", "text"],
    ["topics", "Topics, for example orders:0,4-7; empty: all", "list"], ["keep_done", "Keep offsets done above the commit point", "check"]];
  return [
    h("div", { class: "head", key: "head" }, h("h1", null, isMember ? member : name), pill(level, word), h("span", { class: "space" }),
      group.commands && topics.length > 0 && [action("Pause …", "pause", target, topic), action("Resume …", "resume", target, topic)],
      !isMember && action("Set offsets …", "offsets", { group: name }, offsets), isMember && group.commands && action("Stacks", "stacks", target)),
    tiles(group, consumes, isMember),
    group.problems.length > 0 && card("problems", "What holds it up", problems.length < group.problems.length ? `${problems.length} of ${group.problems.length}` : "",
      h("ul", { class: "problems" }, problems.map((problem, number) => problemItem(problem, null, number)))),
    consumes && h("div", { class: "charts", key: "charts" },
      chart("handled", "Messages/s", count, [["", series.handled, ""]]), chart("lag", "Lag", count, [["", series.lag, ""]]),
      chart("latency", "Latency", span, [["p50", series.p50, ""], ["p99", series.p99, "second"]]),
      chart("failed", "Failed/s", count, [["", series.failed, ""]])),
    !consumes && group.sinks.length > 0 && sinks(group),
    consumes && [lanes(group.lanes), partitions(group)], !isMember && members(group),
    consumes && h("div", { class: "pair", key: "pair" }, parked(group), h("div", { class: "pair" }, pauses(group), deadLetters(group))),
    group.coordinators.length > 0 && transactions(group), consumes && group.sinks.length > 0 && sinks(group)];
}

// ---- Details and actions. ----

const dialog = document.getElementById("dialog");
let token = "";  // in memory only: a reload asks for it again
const can = (name) => known.state.actions.includes(name);

function openDialog(title, ...kids) {
  patch(dialog, []);
  patch(dialog, [h("h2", { id: "dialog-title" }, title), ...kids]);
  if (!dialog.open) dialog.showModal();
}
const buttons = (...kids) => h("div", { class: "buttons" }, ...kids, h("button", { onClick: () => dialog.close() }, "Close"));
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => ![undefined, null, false, ""].includes(value)).map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));

function openDetails(item, title = place(item)) {
  const at = { ...item, offset: item.blocking_offset ?? item.offset, member: item.member || known.route.member };
  const inFlight = item.in_flight !== undefined && `${count(item.in_flight)} (${count(item.bytes_in_flight || 0)} bytes)`;
  const pairs = [
    ["What holds it", item.holds || item.state], ["Error", item.error], ["Member", at.member], ["Topic", item.topic],
    ["Partition", item.partition], ["Offset", at.offset], ["For", item.age && span(item.age)], ["Failed tries", item.attempt],
    ["Lag", item.lag ?? item.waiting], ["Watermark", item.watermark], ["Position", item.position],
    ["Gaps above the watermark", item.gaps], ["In flight", inFlight], ["Parked", item.parked], ["Handler", item.handler],
    ["Worker", item.worker], ["Key hash", item.key_hash]];
  openDialog(title, h("p", null, item.text), facts(pairs), h("div", { id: "message" }),
    buttons(showMessage(at), showStack(at), actionsOf(at), item.kind === undefined && pauseOrResume(at)));
}
function showMessage(message) {
  if (message.offset === undefined || message.offset === null || !known.state) return null;
  if (!known.state.messages) return h("span", { class: "dim" }, "Key and payload are hidden; start with --show-messages to see them.");
  return h("button", { onClick: () => loadMessage(message) }, "Show the message");
}
// A producer may write any number: nanoseconds, for example, exceed a browser's dates.
const writtenAt = (ms) => (Math.abs(ms) <= 8.64e15 ? new Date(ms).toISOString() : `${ms} ms after 1970, as it was sent`);
const loadMessage = ({ topic, partition, offset }) => load("api/message?" + new URLSearchParams({ topic, partition, offset }), (reply) =>
  [facts([["Key", reply.key === null ? "none" : reply.key], ["Written", reply.timestamp === null ? "no time" : writtenAt(reply.timestamp)], ["Bytes", reply.bytes], ...reply.headers.map(([name, value]) => ["Header " + name, value])]), h("pre", { pre: reply.value === null ? "(no value)" : reply.value })]);
const inHandler = (item) => ["handler", "in handler", "behind a call"].includes(item.kind || item.state);
function showStack(item) {
  if (!known.state || !known.state.stacks || !inHandler(item)) return null;
  return h("button", { onClick: () => load("api/stacks", (reply) => stacks(reply, item.worker)) }, "Show the stack");
}
function stacks(reply, worker) {
  const found = Object.entries(reply).filter(([name]) => !worker || name === worker);
  return found.length ? found.map(([name, calls]) => h("pre", { pre: [name + ":", ...calls].join("\n  ") })) : [none("The call has ended.")];
}
async function load(address, show) {
  const into = document.getElementById("message");
  patch(into, [h("p", { class: "dim" }, "Reading …")]);
  let kids;
  try {
    const answer = await fetch(address), reply = await answer.json();
    kids = answer.ok ? show(reply) : [h("p", { class: "bad-text" }, reply.said)];
  } catch (error) { kids = [h("p", { class: "bad-text" }, "It could not be read: " + error.message)]; }
  if (into.isConnected) patch(into, kids);
}
// The actions for a problem, or for the message that blocks a partition.
function actionsOf(item) {
  const { group } = known.route, { member, topic, partition, offset } = item, state = item.kind || item.state;
  if (!group) return null;
  const canBeGivenUp = (inHandler(item) || ["parked", "held", "keys"].includes(state)) && offset !== undefined;
  return [item.transaction && settle(item.transaction),
    heard(member) && canBeGivenUp && action("Give up", "give-up", { group, member, topic, partition, offset }), heard(member) && inHandler(item) && action("Stacks", "stacks", { group, member })];
}
function pauseOrResume(item) {
  if (!heard(item.member) || item.partition === undefined) return null;
  const where = { group: known.route.group, topic: item.topic, partition: item.partition };
  return String(item.paused || "").startsWith("by the app") ? action("Resume", "resume", where) : action("Pause", "pause", where);
}
const heard = (member) => Boolean(known.state && known.state.group && known.state.group.members.some((candidate) => candidate.member === member && candidate.commands));
function action(label, name, parameters, fields) {
  return can(name) ? h("button", { class: "act", onClick: () => ask(label.replace(" …", ""), name, parameters, fields || []) }, label) : null;
}

// Asks for missing arguments, shows the dry run, asks for confirmation, and then shows the result.
function ask(label, name, parameters, fields, said, given = {}) {
  const field = ([key, title, kind, of]) => kind === "check"
    ? h("label", { class: "check", key }, h("input", { type: "checkbox", name: key, checked: given[key] }), title)
    : h("label", { key }, title, kind === "select" ? h("select", { name: key }, of.map((option) => h("option", { value: option, selected: option === given[key] }, option)))
      : h("input", { name: key, type: kind === "number" ? "number" : "text", start: [given[key] ?? of ?? ""].flat().join(" "), required: kind !== "list", autocomplete: "off" }));
  const submit = (event) => {
    event.preventDefault();
    const form = event.target, body = { ...parameters };
    if (form.elements.token) token = form.elements.token.value;
    for (const [key, , kind] of fields) {
      const input = form.elements[key];
      if (kind === "check") body[key] = input.checked;
      else if (kind === "number") body[key] = Number(input.value);
      else if (kind === "list") { if (input.value.trim()) body[key] = input.value.trim().split(/\s+/); }
      else body[key] = input.value;
    }
    post(label, name, parameters, fields, body, true);
  };
  if (token && !fields.length && !said) { post(label, name, parameters, fields, parameters, true); return; }
  openDialog(label, said && h("p", { class: "bad-text" }, said), facts(Object.entries(parameters)), h("form", { onSubmit: submit }, fields.map(field),
    !token && h("label", { key: "token" }, "Token of the dashboard", h("input", { name: "token", type: "password", required: true, autocomplete: "off" })),
    h("div", { class: "buttons" }, h("button", { type: "button", onClick: () => dialog.close() }, "Cancel"), h("button", { class: "main" }, "Go on"))));
}
async function post(label, name, parameters, fields, body, dry) {
  let answer, reply;
  openDialog(label, h("p", { class: "dim" }, dry ? "Asking what it would do …" : "Doing it …"));
  try {
    answer = await fetch("api/actions/" + name, { method: "POST", headers: { "Content-Type": "application/json", Authorization: "Bearer " + token }, body: JSON.stringify(dry ? { ...body, dry_run: true } : body) });
    reply = await answer.json();
  } catch (error) { openDialog(label, h("p", { class: "bad-text" }, "No answer: " + error.message + (dry ? ". Nothing was done." : ". The result is unknown; see the audit topic.")), buttons()); return; }
  if (answer.status === 401) { token = ""; ask(label, name, parameters, fields, reply.said, body); return; }
  if (!answer.ok) { openDialog(label, h("p", { class: "bad-text" }, reply.said), buttons()); return; }
  if (dry) {
    openDialog(label, h("p", null, reply.said), reply.details && h("pre", { pre: reply.details }), h("div", { class: "buttons" }, h("button", { onClick: () => dialog.close() }, "Cancel"),
      h("button", { class: "danger", onClick: () => post(label, name, parameters, fields, body, false) }, label)));
    return;
  }
  const level = reply.outcome === "done" || reply.outcome === "sent" ? "ok" : "bad";
  openDialog(label, h("p", null, pill(level, reply.outcome), " ", reply.said), reply.details && h("pre", { pre: reply.details }), reply.id && h("p", { class: "dim" }, "In the audit topic as " + reply.id), buttons());
}

// ---- The whole page. ----

function topBar() {
  const { group, member } = known.route, state = known.state, own = state && state.of === "this process";
  const late = Date.now() - known.at > 8000, isMember = member !== undefined;
  let level = late ? "bad" : state && state.trouble ? "warn" : "ok";
  let word = !state ? "connecting" : late ? "nothing new for " + span((Date.now() - known.at) / 1000) : "live";
  if (known.link === "waiting") [level, word] = ["", "connecting"];
  if (known.link === "lost") [level, word] = ["bad", "connection lost; trying"];
  const filter = (event) => { known.filter = event.target.value.trim().toLowerCase(); draw(); };
  const arrow = () => h("span", null, "›");
  return [
    h("a", { class: "brand", href: "#/", "aria-label": "penstock: to all groups" }, h("img", { src: "icon.svg", alt: "" }), "penstock"),
    h("nav", { class: "crumbs", "aria-label": "where you are" },
      group !== undefined && [h("a", { href: "#/" }, own ? "This process" : "All groups"), arrow(),
        isMember ? h("a", { href: address(group) }, group) : h("b", null, group)],
      isMember && [arrow(), h("b", null, member)]),
    h("input", { id: "filter", class: "filter", type: "search", placeholder: "Filter   /", "aria-label": "Filter what is shown",
      autocomplete: "off", spellcheck: "false", onInput: filter }),
    h("span", { class: "live" }, h("span", { class: "dot " + level }), word)];
}
function banners(state) {
  const passed = Object.entries(state.ignored || {});
  return [
    known.link === "lost" && h("div", { class: "banner", key: "lost", role: "alert" }, "The dashboard does not answer: this is the state of " + new Date(known.at).toLocaleTimeString() + ". The page tries again."),
    state.trouble && h("div", { class: "banner", key: "trouble", role: "alert" }, state.of === "this process" ? seen(state.trouble) : "This is the last known state: " + state.trouble),
    passed.length > 0 && h("div", { class: "banner soft", key: "ignored" }, "Ignored records, which are no reports: " + passed.map(([why, n]) => `${n} ${why}`).join(", "))];
}
let drawing = false;
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const { group, member } = known.route, state = known.state;
    document.title = [member, group, "penstock"].filter(Boolean).map(flat).join(" · ");
    patch(document.getElementById("top"), topBar());
    patch(document.getElementById("main"), state === null ? [h("p", { class: "empty" }, known.link === "lost" ? "The dashboard does not answer; the page tries again." : "Waiting for the first state …")]
      : [banners(state), group === undefined ? overview(state) : groupPage(state)]);
  });
}
addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => { unfollow(); if (!document.hidden) follow(); });
document.addEventListener("keydown", (event) => {
  const field = document.getElementById("filter");
  if (event.key === "/" && !event.ctrlKey && !event.metaKey && !dialog.open && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); field.focus(); }
  if (event.key !== "Escape" || dialog.open) return;
  if (known.filter) { known.filter = ""; field.value = ""; draw(); }
  else if (document.activeElement === field) field.blur();
  else if (known.route.group !== undefined) location.hash = known.route.member !== undefined ? address(known.route.group) : "#/";
});
setInterval(() => { if (Date.now() - known.at > 8000) draw(); }, 2000);
go();
