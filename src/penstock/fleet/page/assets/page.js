// The page: it draws what the server tells, as text and never as markup, and asks for nothing else.
"use strict";

// ---- Drawing: nodes are described by h() and laid over those that are there, so focus and scrolling stay. ----

const SVG = new Set(["svg", "path", "rect", "line", "g"]);
// What would not show, or would turn text round: shown by its number.
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

// ---- Words for numbers. ----

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
const place = (one) => (one.partition === undefined || one.partition < 0 ? one.topic : `${one.topic}:${one.partition}`);

// ---- What is known, and where it comes from. ----

const known = { state: null, history: {}, route: {}, filter: "", hover: null, at: 0, link: "waiting" };
let following = null;

// Half a character has no address.
const address = (...parts) => "#/" + parts.filter((part) => part !== undefined).map((part) => encodeURIComponent(part.toWellFormed())).join("/");
function readRoute() {
  const decode = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
  const [group, member] = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decode);
  return { group, member };
}
// Asks for the state after the one that is known, for as long as this view is looked at; the server says when.
async function follow() {
  const own = (following = new AbortController());
  const query = new URLSearchParams(Object.entries(known.route).filter(([, name]) => name !== undefined));
  while (following === own) {
    let reply = null;
    try {
      const answer = await fetch("api/groups?" + query, { signal: own.signal });
      if (answer.ok) reply = await answer.json();
    } catch { /* nothing answers, which shows */ }
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
const sum = (list, name) => list.reduce((all, one) => all + (one[name] || 0), 0);
const matches = (...parts) => !known.filter || parts.flat().join(" ").toLowerCase().includes(known.filter);

// ---- Parts of the page. ----

const pill = (level, text) => h("span", { class: "pill " + level }, h("span", { class: "dot " + level }), text);
function levelOf(one) {
  if (one.bad || one.silent) return ["bad", one.bad ? many(one.bad, "problem") : `${one.silent} silent`];
  if (one.warn) return ["warn", `${one.warn} to look at`];
  return one.living ? ["ok", "moving"] : ["", "nobody"];
}
const tile = (name, value, small, level) =>
  h("div", { class: "tile " + (level || "") }, h("dt", null, name), h("dd", null, value, small && h("small", null, small)));
const card = (key, title, small, ...kids) =>
  h("section", { class: "card", key, "aria-label": title }, h("header", null, h("h2", null, title, small && h("small", null, small))), ...kids);
// A column of a table: its title, and what a row has there. On a phone a number stands below its title.
const num = (title, of, write = count) => ({ title, kind: "num", cell: (row) => h("td", { class: "num" + (of(row) ? "" : " zero"), "data-label": title.toLowerCase() }, write(of(row), row)) });
const text = (title, of, kind = "text") => ({ title, kind: "", cell: (row) => h("td", { class: kind }, of(row)) });
const table = (rows, key, columns, kind = () => "") =>
  h("div", { class: "scroll" }, h("table", { class: "cards" },
    h("thead", null, h("tr", null, columns.map((column) => h("th", { class: column.kind, scope: "col" }, column.title)))),
    h("tbody", null, rows.map((row) => h("tr", { key: key(row), class: kind(row) }, columns.map((column) => column.cell(row)))))));

// The runs of points that are known, each as the corners of its line; the last point is at the right.
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
  const reported = (points || []).filter((one) => one !== null);
  if (reported.length < 2) return h("span", { class: "dim" }, "");
  const most = Math.max(...reported, 1e-9), w = Math.max(12, points.length);
  const found = runs(points, w, 24, most);
  return h("svg", { class: "spark", viewBox: `0 0 ${w} 24`, preserveAspectRatio: "none", role: "img", "aria-label": label }, area(found, 24), line(found, ""));
}
function chart(key, title, show, series, dots) {
  const longest = Math.max(...series.map(([, points]) => (points || []).length), 1);
  // A young history is drawn over the whole width.
  const step = known.history.step || 5, width = Math.max(24, longest), height = 66;
  const reported = series.flatMap(([, points]) => points || []).filter((one) => one !== null);
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

function problemItem(one, group, number) {
  const more = [];
  if (one.count > 1) more.push(`${one.count} times`);
  if (one.waiting) more.push(`lag ${count(one.waiting)}`);
  if (one.member && one.kind !== "silent") more.push(one.member);
  if (one.key_hash) more.push("key " + one.key_hash);
  const title = group ? h("a", { href: address(group) }, one.title) : one.title;
  return h("li", { class: one.level, key: [group, one.kind, one.title, number].join("|") },
    h("div", { class: "what" }, h("b", null, h("span", { class: "dot " + one.level, role: "img", "aria-label": { bad: "bad", warn: "to look at", note: "note" }[one.level] }), title), group && h("span", { class: "group" }, "in " + group), one.age !== undefined && h("span", { class: "dim" }, "for " + span(one.age))),
    h("div", { class: "why" }, one.text),
    h("div", { class: "more" }, more.map((text) => h("span", null, text)),
      !group && one.topic && h("button", { class: "act", onClick: () => openDetails(one, one.title) }, "Details"),
      !group && actionsOf(one)));
}

function overview(state) {
  const groups = state.groups, total = (name) => groups.reduce((all, one) => all + (one[name] || 0), 0);
  const problems = groups.flatMap((group) => group.problems.map((one) => [one, group.name]));
  problems.sort(([a], [b]) => "bad warn note".indexOf(a.level) - "bad warn note".indexOf(b.level) || (b.age || 0) - (a.age || 0));
  const shown = groups.filter((one) => matches(one.name, one.problems.map((p) => p.title + p.text)));
  const wanted = problems.filter(([one, group]) => one.level !== "note" && matches(group, one.title, one.text)).slice(0, 8);
  const columns = [
    text("Group", (one) => h("a", { href: address(one.name) }, one.name), "name"), text("State", (one) => pill(...levelOf(one)), "state"),
    num("Members", (one) => one.living, (living, one) => (one.silent ? `${living} + ${one.silent} silent` : count(living))), num("Partitions", (one) => one.partition_count),
    num("Lag", (one) => one.lag, lagText), num("Messages/s", (one) => one.rate),
    text("30 min", (one) => spark((known.history.handled || {})[one.name], `messages a second of ${one.name}, the last half hour`), ""),
    num("In flight", (one) => one.in_flight), num("Parked", (one) => one.parked_keys), num("Dead letters", (one) => one.dead_letters), num("Pending", (one) => one.pending),
    text("First cause", (one) => one.problems.length > 0 && one.problems[0].title, "text dim")];
  return [
    h("div", { class: "head" }, h("h1", null, state.of === "this process" ? "This process" : "All groups"), h("span", { class: "dim" }, state.of === "this process" ? "" : "as they report to " + state.of)),
    h("dl", { class: "tiles" },
      tile("Groups", count(state.count)), tile("Members", count(total("living")), total("silent") ? `${total("silent")} silent` : "", total("silent") ? "bad" : ""),
      tile("Lag", lagText(groups.some((one) => one.lag === null) ? null : total("lag"))), tile("Messages/s", count(total("rate"))), tile("In flight", count(total("in_flight"))),
      tile("Problems", count(total("bad")), total("warn") ? `${total("warn")} to look at` : "", total("bad") ? "bad" : total("warn") ? "warn" : "")),
    wanted.length > 0 && card("look", "What needs a look", "", h("ul", { class: "problems" }, wanted.map(([one, group], number) => problemItem(one, group, number)))),
    card("groups", "Groups", shown.length < state.count ? `${shown.length} of ${state.count}` : "",
      shown.length ? table(shown, (one) => one.name, columns)
        : h("p", { class: "empty" }, state.count ? "No group matches the filter." : "Nobody reports. Start apps with `penstock run --report`, or App(report=True).")),
  ];
}

function lanes(list) {
  const classes = [0.1, 1, 5, 30, 120];
  const heat = (age) => classes.filter((limit) => age >= limit).length;
  const strips = list.map((one) => {
    const depth = one.depth.reduce((sum, each) => sum + each, 0), oldest = Math.max(0, ...one.age), most = Math.max(...one.depth, 1), n = one.depth.length;
    return h("div", { class: "lane", key: one.handler },
      h("div", { class: "title" }, h("b", null, one.handler), h("span", { class: "dim" }, `${many(depth, "message")}, the deepest ${count(most)}, the oldest ${span(oldest)}`)),
      h("svg", { viewBox: `0 0 ${n * 10} 44`, preserveAspectRatio: "none", role: "img", "aria-label": `lanes of ${one.handler}: ${many(depth, "message")}, the oldest ${span(oldest)}` },
        one.depth.map((deep, at) => [
          h("rect", { class: "track", x: at * 10, y: 0, width: 9, height: 44 }),
          deep > 0 && h("rect", { class: "heat" + heat(one.age[at]), x: at * 10, width: 9,
            y: 44 - (44 * (0.12 + 0.88 * Math.log1p(deep) / Math.log1p(most))), height: 44 * (0.12 + 0.88 * Math.log1p(deep) / Math.log1p(most)) }),
        ])));
  });
  const words = ["< 0.1 s", "0.1 s", "1 s", "5 s", "30 s", "2 min"];
  return card("lanes", "Lanes", "height: messages, colour: age of the oldest",
    h("div", { class: "body lanes" }, strips.length ? strips : h("p", { class: "empty" }, "Nothing waits in any lane."),
      strips.length > 0 && h("div", { class: "legend" }, words.map((word, n) => h("span", null, h("svg", { viewBox: "0 0 10 10" }, h("rect", { class: "heat" + n, width: 10, height: 10 })), word)))));
}

const rowlink = (one, title) => h("button", { class: "rowlink", onClick: () => openDetails(one) }, title);
const none = (title) => h("p", { class: "empty" }, title);
function partitions(group) {
  const shown = group.partitions.filter((one) => matches(place(one), one.member, one.state, one.holds)), all = group.partition_count;
  const most = Math.max(1, ...shown.map((one) => one.lag || 0)), width = (lag) => (96 * (lag || 0)) / most;
  const kind = (one) => one.trouble || one.state === "dead letter" || one.state === "held" ? "text bad-text" : one.blocking_offset === undefined && !one.paused ? "text dim" : "text";
  return card("partitions", "Partitions", shown.length < all ? `the ${shown.length} that most need a look, of ${count(all)}` : count(all), shown.length ? table(shown, (one) => one.member + place(one), [
    text("Partition", (one) => [rowlink(one, place(one)), known.route.member === undefined && h("small", null, one.member)], "name"),
    num("Lag", (one) => one.lag, (lag) => [count(lag), lag !== undefined && h("svg", { class: "spark", viewBox: "0 0 96 3", "aria-hidden": "true" }, h("rect", { class: "heat2", x: 96 - width(lag), width: width(lag), height: 3 }))]),
    num("Watermark", (one) => one.watermark ?? -1, (at) => (at < 0 ? "–" : String(at))), num("Gaps", (one) => one.gaps), num("In flight", (one) => one.in_flight), num("Parked", (one) => one.parked),
    text("What holds it", (one) => h("span", { class: kind(one) }, one.holds))]) : none("None."));
}
function members(group) {
  const shown = group.members.filter((one) => matches(one.member, one.host)), all = group.member_count;
  const state = (one) => one.silent ? pill(one.replaced ? "" : "bad", (one.replaced ? "replaced, " : "") + `silent for ${span(one.age)}`) : pill("ok", "reports");
  return card("members", "Members", shown.length < all ? `${shown.length} of ${all}` : count(all), table(shown, (one) => one.member, [
    text("Member", (one) => [h("a", { href: address(group.name, one.member) }, one.member), h("small", null, `process ${one.process} on ${one.host}`)], "name"), text("State", state, "state"),
    num("Partitions", (one) => one.partition_count), num("Lag", (one) => one.lag, lagText), num("Messages/s", (one) => one.rate), num("Failed/s", (one) => one.failed_rate), num("In flight", (one) => one.in_flight),
    num("Workers busy", (one) => one.busy, (busy, one) => (one.workers === null ? "–" : `${busy} of ${one.workers}`)), num("Parked", (one) => one.parked_keys), num("Up", (one) => one.uptime, span),
    ...(can("stacks") ? [text("", (one) => one.commands && action("Stacks", "stacks", { group: group.name, member: one.member }))] : [])], (one) => (one.silent ? "silent" : "")));
}
function parked(group) {
  const shown = group.parked.filter((one) => matches(place(one), one.handler, one.key_hash));
  return card("parked", "Parked keys", count(group.parked_keys), group.parked.length ? table(shown, (one) => place(one) + one.offset, [
    text("Head", (one) => rowlink(one, `${place(one)}@${one.offset}`), "name"), text("Handler", (one) => one.handler, ""), text("State", (one) => one.state, ""),
    num("Tries", (one) => one.attempt), num("Since", (one) => one.age, span), num("Next try", (one) => one.due_in, (due) => (due === undefined ? "not set" : "in " + span(due)))]) : none("None."));
}
function deadLetters(group) {
  const origin = (age, one) => one.offset === null ? span(age) + " ago" : [rowlink(one, `${place(one)}@${one.offset}`), h("small", { class: "dim" }, ` ${span(age)} ago`)];
  return card("letters", "Dead letters", many(sum(group.dead_letters, "count"), "message") + " since the members' start", group.dead_letters.length ? table(group.dead_letters, (one) => [one.topic, one.dead_letter_topic, one.error].join("|"), [
    text("Reason", (one) => [one.error, h("small", null, `${one.topic} → ${one.dead_letter_topic}`)], "name"), num("Messages", (one) => one.count), num("Last", (one) => one.age, origin),
    ...(can("replay") ? [text("", (one) => action("Replay …", "replay", { topic: one.dead_letter_topic }, [["partition", "Partition", "number"], ["offset", "Offset", "number"]]))] : [])]) : none("None since the members' start."));
}
function pauses(group) {
  const now = Object.entries(group.paused), before = Object.entries(group.pauses);
  return card("pauses", "Pauses", now.length ? "" : "none now", h("div", { class: "body" },
    now.map(([why, n]) => h("p", { key: "n" + why }, h("b", null, many(n, "partition")), " now: ", why)),
    before.length > 0 && h("p", { class: "dim", key: "before" }, "since the start: " + before.map(([why, n]) => `${why} ${count(n)}`).join(", ")),
    !now.length && !before.length && h("p", { class: "dim" }, "No partition was paused.")));
}
function transactions(group) {
  const counts = group.coordinators.map((one) => one.counts), total = (name) => count(sum(counts, name));
  return card("transactions", "Transactions", `${total("pending")} pending, the oldest ${span(Math.max(0, ...counts.map((one) => one.oldest_pending_age || 0)))}`,
    h("div", { class: "body dim" }, `${total("committed")} committed, ${total("rolled_back")} rolled back, ${total("discarded")} discarded, ${total("checks")} checks, ${total("no_producer")} of which reached no producer`,
      resumers(group).map((given) => h("span", { key: given.member || "" }, " ", action("Resume a discarded one …", "resume-transaction", given, (given.group ? [] : [["prefix", "Prefix of the store", "text", "penstock"]]).concat([["transaction_id", "Transaction", "text"]]))))),
    group.transactions.length > 0 && table(group.transactions, (one) => one.id, [
      text("Transaction", (one) => one.id, "name mono"), text("Producer group", (one) => one.group), text("Topics", (one) => one.topics), num("Age", (one) => one.age, span), num("Checks", (one) => one.checks),
      text("Waits for", (one) => one.waits_for || "the decision of its producer"), ...(can("settle") ? [text("", settle)] : [])]));
}
// Who settles: anybody where the store is in Kafka, else the coordinator, where it hears commands; null: nobody from here.
function operated(operator) {
  const of = operator || {};
  return (of.store || "kafka") === "kafka" ? {} : of.group ? { group: of.group, member: of.member } : null;
}
function settle(one) {
  const by = operated(one.operator);
  return by && action("Settle …", "settle", by.group ? { ...by, transaction_id: one.id } : { prefix: one.prefix, transaction_id: one.id }, [["decision", "Decision", "select", ["rollback", "commit", "discard"]]]);
}
function resumers(group) {
  const found = group.coordinators.map((one) => operated(one.operator)).filter(Boolean);
  return found.filter((one) => one.group).concat(found.filter((one) => !one.group).slice(0, 1));
}
function sinks(group) {
  const past = Object.entries(known.history.series || {}).filter(([name]) => name.startsWith("batch "));
  const state = (one) => pill(["running", "standby"].includes(one.state) ? "ok" : one.state === "failed" ? "bad" : "warn", one.state);
  return [card("sinks", "Spark queries", "", table(group.sinks, (one) => one.name + one.member, [
    text("Query", (one) => one.name, "name"), text("State", state, ""), num("Batch", (one) => one.batch_id, (id) => String(id ?? "–")), num("Rows", (one) => one.rows), num("Rows/s", (one) => one.rows_per_s),
    num("Last batch took", (one) => one.batch_seconds, span), num("Lag", (one) => one.lag), num("Restarts", (one) => one.restarts), text("Last error", (one) => one.last_error)])),
    past.length > 0 && h("div", { class: "charts", key: "sinkcharts" }, past.map(([name, points]) => chart(name, `Batches of ${name.slice(6)}`, span, [["", points, ""]], true)))];
}

function groupPage(state) {
  const group = state.group, { group: name, member } = known.route;
  if (!group || (member !== undefined && !group.members.length)) return [h("div", { class: "head" }, h("h1", null, member || name)), h("p", { class: "empty" }, member !== undefined ? "This member does not report now." : "No member of this group reports now."), h("p", null, h("a", { href: member !== undefined ? address(name) : "#/" }, "Back"))];
  const series = known.history.series || {}, [p50, p99] = [series.p50, series.p99].map((points) => (points || []).at(-1)), [level, word] = levelOf({ ...group, bad: group.problems.filter((p) => p.level === "bad").length, warn: group.problems.filter((p) => p.level === "warn").length });
  const topics = [...new Set(group.partitions.map((one) => one.topic))];
  const who = member === undefined ? { group: name } : { group: name, member };
  // A process may have Spark queries or a coordinator alone: then nothing is said of what it has not.
  const consumes = group.partition_count > 0 || group.partitions.length > 0 || (!group.sinks.length && !group.coordinators.length);
  const shownProblems = group.problems.filter((one) => matches(one.title, one.text, one.member));
  return [
    h("div", { class: "head", key: "head" }, h("h1", null, member === undefined ? name : member), pill(level, word), h("span", { class: "space" }),
      group.commands && topics.length > 0 && [action("Pause …", "pause", who, [["topic", "Topic", "select", topics]]), action("Resume …", "resume", who, [["topic", "Topic", "select", topics]])],
      member === undefined && action("Set offsets …", "offsets", { group: name }, [["to", "To: earliest, latest, a time, an offset, +N or -N", "text"], ["topics", "Topics, as orders:0,4-7; all where empty", "list"], ["keep_done", "Keep what is done above", "check"]]),
      member !== undefined && group.commands && action("Stacks", "stacks", who)),
    h("dl", { class: "tiles", key: "tiles" },
      !consumes && group.sinks.length > 0 && [tile("Rows/s", count(sum(group.sinks, "rows_per_s"))), tile("Lag", lagText(group.sinks.some((one) => one.lag === undefined) ? null : sum(group.sinks, "lag")))],
      !consumes && group.coordinators.length > 0 && [tile("Published/s", count(group.rate)), tile("Pending", count(sum(group.coordinators.map((one) => one.counts), "pending"))), tile("Held", count(sum(group.coordinators.map((one) => one.counts), "held")))],
      consumes && [tile("Messages/s", count(group.rate), group.failed_rate ? `${count(group.failed_rate)} failed` : ""), tile("Lag", lagText(group.lag)), tile("In flight", count(group.in_flight))],
      consumes && tile("Done within", span(p50), p99 === undefined || p99 === null ? "" : `99 % ${span(p99)}`),
      consumes && [tile("Parked keys", count(group.parked_keys), group.held_keys ? `${group.held_keys} held` : "", group.held_keys ? "bad" : ""), tile("Dead letters", count(sum(group.dead_letters, "count")), group.dead_letter_failures ? `${count(group.dead_letter_failures)} refused` : "", group.dead_letter_failures ? "warn" : "")],
      member === undefined && tile("Members", count(group.living), group.silent ? `${group.silent} silent` : "", group.silent ? "bad" : "")),
    group.problems.length > 0 && card("problems", "What holds it up", shownProblems.length < group.problems.length ? `${shownProblems.length} of ${group.problems.length}` : "", h("ul", { class: "problems" }, shownProblems.map((one, number) => problemItem(one, null, number)))),
    consumes && h("div", { class: "charts", key: "charts" },
      chart("handled", "Messages/s", count, [["", series.handled, ""]]), chart("lag", "Lag", count, [["", series.lag, ""]]),
      chart("latency", "Latency", span, [["p50", series.p50, ""], ["p99", series.p99, "second"]]),
      chart("failed", "Failed/s", count, [["", series.failed, ""]])),
    !consumes && group.sinks.length > 0 && sinks(group),
    consumes && [lanes(group.lanes), partitions(group)], member === undefined && members(group),
    consumes && h("div", { class: "pair", key: "pair" }, parked(group), h("div", { class: "pair" }, pauses(group), deadLetters(group))),
    group.coordinators.length > 0 && transactions(group), consumes && group.sinks.length > 0 && sinks(group)];
}

// ---- Details, and what can be done. ----

const dialog = document.getElementById("dialog");
let token = "";  // in memory only: it is asked for again after a reload
const can = (name) => known.state.actions.includes(name);

function openDialog(title, ...kids) {
  patch(dialog, []);
  patch(dialog, [h("h2", { id: "dialog-title" }, title), ...kids]);
  if (!dialog.open) dialog.showModal();
}
const buttons = (...kids) => h("div", { class: "buttons" }, ...kids, h("button", { onClick: () => dialog.close() }, "Close"));
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => ![undefined, null, false, ""].includes(value)).map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));

function openDetails(one, title = place(one)) {
  const at = { ...one, offset: one.blocking_offset ?? one.offset, member: one.member || known.route.member }, flying = one.in_flight !== undefined;
  openDialog(title, h("p", null, one.text), facts([["What holds it", one.holds || one.state], ["Error", one.error], ["Member", at.member], ["Topic", one.topic], ["Partition", one.partition], ["Offset", at.offset], ["For", one.age && span(one.age)],
    ["Failed tries", one.attempt], ["Lag", one.lag ?? one.waiting], ["Watermark", one.watermark], ["Position", one.position], ["Gaps above the watermark", one.gaps], ["In flight", flying && `${count(one.in_flight)} (${count(one.bytes_in_flight || 0)} bytes)`],
    ["Parked", one.parked], ["Handler", one.handler], ["Worker", one.worker], ["Key hash", one.key_hash]]),
    h("div", { id: "message" }), buttons(showMessage(at), actionsOf(at), one.kind === undefined && pauseOrResume(at)));
}
function showMessage(one) {
  if (one.offset === undefined || one.offset === null || !known.state) return null;
  if (!known.state.messages) return h("span", { class: "dim" }, "Key and payload are hidden; --show-messages shows them.");
  return h("button", { onClick: () => loadMessage(one) }, "Show the message");
}
// A producer may write any number: nanoseconds are no date that a browser has.
const writtenAt = (ms) => (Math.abs(ms) <= 8.64e15 ? new Date(ms).toISOString() : `${ms} ms after 1970, as it was sent`);
async function loadMessage(one) {
  const into = document.getElementById("message");
  patch(into, [h("p", { class: "dim" }, "Reading …")]);
  let kids;
  try {
    const answer = await fetch("api/message?" + new URLSearchParams({ topic: one.topic, partition: one.partition, offset: one.offset }));
    const reply = await answer.json();
    kids = answer.ok
      ? [facts([["Key", reply.key === null ? "none" : reply.key], ["Written", reply.timestamp === null ? "no time" : writtenAt(reply.timestamp)], ["Bytes", reply.bytes], ...reply.headers.map(([name, value]) => ["Header " + name, value])]), h("pre", { pre: reply.value === null ? "(no value)" : reply.value })]
      : [h("p", { class: "bad-text" }, reply.said)];
  } catch (error) { kids = [h("p", { class: "bad-text" }, "It could not be read: " + error.message)]; }
  if (into.isConnected) patch(into, kids);
}
// What can be done about a problem, or about the message that holds a partition.
function actionsOf(one) {
  const { group } = known.route, { member, topic, partition, offset } = one, state = one.kind || one.state;
  if (!group) return null;
  const inHandler = ["handler", "in handler", "behind a call"].includes(state);
  const canBeGivenUp = (inHandler || ["parked", "held", "keys"].includes(state)) && offset !== undefined;
  return [one.transaction && settle(one.transaction),
    heard(member) && canBeGivenUp && action("Give up", "give-up", { group, member, topic, partition, offset }), heard(member) && inHandler && action("Stacks", "stacks", { group, member })];
}
function pauseOrResume(one) {
  if (!heard(one.member) || one.partition === undefined) return null;
  const where = { group: known.route.group, topic: one.topic, partition: one.partition };
  return String(one.paused || "").startsWith("by the app") ? action("Resume", "resume", where) : action("Pause", "pause", where);
}
const heard = (member) => Boolean(known.state && known.state.group && known.state.group.members.some((one) => one.member === member && one.commands));
function action(label, name, given, fields) {
  return can(name) ? h("button", { class: "act", onClick: () => ask(label.replace(" …", ""), name, given, fields || []) }, label) : null;
}

// Asks for what is missing, shows what would be done, asks once more, and then shows what was done.
function ask(label, name, given, fields, said) {
  const field = ([key, title, kind, of]) => kind === "check"
    ? h("label", { class: "check", key }, h("input", { type: "checkbox", name: key }), title)
    : h("label", { key }, title, kind === "select" ? h("select", { name: key }, of.map((one) => h("option", { value: one }, one)))
      : h("input", { name: key, type: kind === "number" ? "number" : "text", start: of || "", required: kind !== "list", autocomplete: "off" }));
  const submit = (event) => {
    event.preventDefault();
    const form = event.target, body = { ...given };
    if (form.elements.token) token = form.elements.token.value;
    for (const [key, , kind] of fields) {
      const input = form.elements[key];
      if (kind === "check") body[key] = input.checked;
      else if (kind === "number") body[key] = Number(input.value);
      else if (kind === "list") { if (input.value.trim()) body[key] = input.value.trim().split(/\s+/); }
      else body[key] = input.value;
    }
    post(label, name, given, fields, body, true);
  };
  if (token && !fields.length && !said) { post(label, name, given, fields, given, true); return; }
  openDialog(label, said && h("p", { class: "bad-text" }, said), facts(Object.entries(given)), h("form", { onSubmit: submit }, fields.map(field),
    !token && h("label", { key: "token" }, "Token of the dashboard", h("input", { name: "token", type: "password", required: true, autocomplete: "off" })),
    h("div", { class: "buttons" }, h("button", { type: "button", onClick: () => dialog.close() }, "Cancel"), h("button", { class: "main" }, "Go on"))));
}
async function post(label, name, given, fields, body, dry) {
  let answer, reply;
  openDialog(label, h("p", { class: "dim" }, dry ? "Asking what it would do …" : "Doing it …"));
  try {
    answer = await fetch("api/actions/" + name, { method: "POST", headers: { "Content-Type": "application/json", Authorization: "Bearer " + token }, body: JSON.stringify(dry ? { ...body, dry_run: true } : body) });
    reply = await answer.json();
  } catch (error) { openDialog(label, h("p", { class: "bad-text" }, "No answer: " + error.message + ". Whether it was done is not known; the audit topic tells."), buttons()); return; }
  if (answer.status === 401) { token = ""; ask(label, name, given, fields, reply.said); return; }
  if (!answer.ok) { openDialog(label, h("p", { class: "bad-text" }, reply.said), buttons()); return; }
  if (dry) {
    openDialog(label, h("p", null, reply.said), reply.details && h("pre", { pre: reply.details }), h("div", { class: "buttons" }, h("button", { onClick: () => dialog.close() }, "Cancel"),
      h("button", { class: "danger", onClick: () => post(label, name, given, fields, body, false) }, label)));
    return;
  }
  const level = reply.outcome === "done" || reply.outcome === "sent" ? "ok" : "bad";
  openDialog(label, h("p", null, pill(level, reply.outcome), " ", reply.said), reply.details && h("pre", { pre: reply.details }), reply.id && h("p", { class: "dim" }, "In the audit topic as " + reply.id), buttons());
}

// ---- The whole. ----

function topBar() {
  const { group, member } = known.route, state = known.state, own = state && state.of === "this process";
  const late = Date.now() - known.at > 8000;
  const level = known.link === "live" && !late ? (state && state.trouble ? "warn" : "ok") : known.link === "waiting" ? "" : "bad";
  const word = known.link === "lost" ? "connection lost; trying" : known.link === "waiting" || !state ? "connecting" : late ? "nothing new for " + span((Date.now() - known.at) / 1000) : "live";
  return [
    h("a", { class: "brand", href: "#/", "aria-label": "penstock: to all groups" }, h("img", { src: "icon.svg", alt: "" }), "penstock"),
    h("nav", { class: "crumbs", "aria-label": "where you are" }, group !== undefined && [h("a", { href: "#/" }, own ? "This process" : "All groups"), h("span", null, "›"), member !== undefined ? h("a", { href: address(group) }, group) : h("b", null, group)], member !== undefined && [h("span", null, "›"), h("b", null, member)]),
    h("input", { id: "filter", class: "filter", type: "search", placeholder: "Filter   /", "aria-label": "Filter what is shown", autocomplete: "off", spellcheck: "false", onInput: (event) => { known.filter = event.target.value.trim().toLowerCase(); draw(); } }),
    h("span", { class: "live" }, h("span", { class: "dot " + level }), word)];
}
function banners(state) {
  const passed = Object.entries(state.ignored || {});
  return [
    known.link === "lost" && h("div", { class: "banner", key: "lost", role: "alert" }, "The dashboard does not answer: what you see is of " + new Date(known.at).toLocaleTimeString() + ". It is tried again."),
    state.trouble && h("div", { class: "banner", key: "trouble", role: "alert" }, state.of === "this process" ? seen(state.trouble) : "Nothing newer is known than what is shown: " + state.trouble),
    passed.length > 0 && h("div", { class: "banner soft", key: "ignored" }, "Records that are no reports were passed over: " + passed.map(([why, n]) => `${n} ${why}`).join(", "))];
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
    patch(document.getElementById("main"), state === null ? [h("p", { class: "empty" }, known.link === "lost" ? "The dashboard does not answer; it is tried again." : "Waiting for the first state …")]
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
