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

function count(n) {
  if (n === null || n === undefined) return "–";
  const a = Math.abs(n);
  if (a >= 1e9) return (n / 1e9).toPrecision(3) + "G";
  if (a >= 1e6) return (n / 1e6).toPrecision(3) + "M";
  if (a >= 1e4) return (n / 1e3).toPrecision(3) + "k";
  if (a >= 100 || Number.isInteger(n)) return Math.round(n).toLocaleString("en");
  return Number(n.toPrecision(2)).toString();
}
function span(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return Number((s * 1000).toPrecision(2)) + " ms";
  if (s < 10) return s.toFixed(1) + " s";
  if (s < 120) return Math.round(s) + " s";
  if (s < 7200) return Math.round(s / 60) + " min";
  if (s < 172800) return (s / 3600).toFixed(1) + " h";
  return Math.round(s / 86400) + " d";
}
const many = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const place = (one) => (one.partition === undefined || one.partition < 0 ? one.topic : `${one.topic}:${one.partition}`);

// ---- What is known, and where it comes from. ----

const known = { state: null, history: {}, route: {}, filter: "", hover: null, at: 0, link: "waiting", actions: [], problem: null };
let following = null;

function encode(text) {
  try { return encodeURIComponent(text); } catch { return null; }  // half a character has no address
}
function address(group, member) {
  const parts = [group, member].filter((one) => one !== undefined && one !== null).map(encode);
  return parts.includes(null) ? "#/" : "#/" + parts.join("/");
}
function readRoute() {
  const decode = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
  const [group, member] = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decode);
  return { group, member };
}
// Asks for the state after the one that is known, for as long as this view is looked at; the server says when.
async function follow() {
  const own = (following = new AbortController());
  const query = new URLSearchParams();
  if (known.route.group !== undefined) query.set("group", known.route.group);
  if (known.route.member !== undefined) query.set("member", known.route.member);
  while (following === own) {
    try {
      const answer = await fetch("api/groups?" + query, { signal: own.signal });
      if (!answer.ok) throw new Error(String(answer.status));
      const reply = await answer.json();
      if (following !== own) return;
      query.set("after", reply.made);
      if (reply.history) known.history = reply.history;
      known.state = reply;
      known.at = Date.now();
      known.link = "live";
    } catch {
      if (following !== own) return;
      known.link = "lost";
      query.delete("after");
      await new Promise((go) => setTimeout(go, 1000));
    }
    draw();
  }
}
function unfollow() {
  if (following) following.abort();
  following = null;
}
function go() {
  known.route = readRoute();
  known.state = null;
  known.history = {};
  known.filter = "";
  known.hover = null;
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
const num = (label, value, shown, extra) =>
  h("td", { class: "num" + (value ? "" : " zero") + (extra ? " " + extra : ""), "data-label": label }, shown === undefined ? count(value) : shown);
const table = (columns, rows, cards) =>
  h("div", { class: "scroll" }, h("table", { class: cards === false ? "" : "cards" },
    h("thead", null, h("tr", null, columns.map(([name, kind]) => h("th", { class: kind || "", scope: "col" }, name)))),
    h("tbody", null, rows)));

function path(points, width, height, most, dots) {
  let text = "", pen = false;
  points.forEach((value, number) => {
    if (value === null) { pen = false; return; }
    const x = width - (points.length - 1 - number), y = height - (most ? (value / most) * (height - 3) : 0) - 1;
    text += (pen ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1) + (pen ? "" : "h.01");
    pen = !dots;
  });
  return text;
}
function area(points, width, height, most) {
  let text = "", from = null, last = null;
  const close = () => { if (from !== null) text += `L${last} ${height}L${from} ${height}Z`; from = null; };
  points.forEach((value, number) => {
    if (value === null) { close(); return; }
    const x = width - (points.length - 1 - number), y = (height - (most ? (value / most) * (height - 3) : 0) - 1).toFixed(1);
    text += from === null ? `M${x} ${y}` : `L${x} ${y}`;
    if (from === null) from = x;
    last = x;
  });
  close();
  return text;
}
function spark(points, label) {
  const reported = (points || []).filter((one) => one !== null);
  if (reported.length < 2) return h("span", { class: "dim" }, "");
  const most = Math.max(...reported, 1e-9), w = Math.max(12, points.length);
  return h("svg", { class: "spark", viewBox: `0 0 ${w} 24`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("path", { class: "area", d: area(points, w, 24, most) }), h("path", { class: "line", d: path(points, w, 24, most) }));
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
    for (let at = points.length - 1; at >= Math.max(0, points.length - 3 - (dots ? 360 : 0)); at--) if (points[at] !== null) return points[at];
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
      series.length === 1 && !dots && h("path", { class: "area", d: area(series[0][1] || [], width, height, most) }),
      series.map(([, points, kind]) => h("path", { class: `line ${kind}${dots ? " dots" : ""}`, d: path(points || [], width, height, most, dots) })),
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
      !group && (one.topic || one.stack !== undefined) && h("button", { class: "act", onClick: () => openProblem(one) }, "Details"),
      !group && problemActions(one)));
}

function overview(state) {
  const groups = state.groups, total = (name) => groups.reduce((all, one) => all + (one[name] || 0), 0);
  const problems = groups.flatMap((group) => group.problems.map((one) => [one, group.name]));
  problems.sort(([a], [b]) => "bad warn note".indexOf(a.level) - "bad warn note".indexOf(b.level) || (b.age || 0) - (a.age || 0));
  const shown = groups.filter((one) => matches(one.name, one.problems.map((p) => p.title + p.text)));
  const wanted = problems.filter(([one, group]) => one.level !== "note" && matches(group, one.title, one.text)).slice(0, 8);
  const row = (one) => {
    const [level, word] = levelOf(one), worst = one.problems[0];
    return h("tr", { key: one.name },
      h("td", { class: "name" }, h("a", { href: address(one.name) }, one.name)),
      h("td", { class: "state" }, pill(level, word)),
      num("members", one.living, one.silent ? `${one.living} + ${one.silent} silent` : undefined),
      num("partitions", one.partition_count), num("lag", one.lag, lagText(one.lag)), num("messages/s", one.rate),
      h("td", null, spark((known.history.handled || {})[one.name], `messages a second of ${one.name}, the last half hour`)),
      num("in flight", one.in_flight), num("parked keys", one.parked_keys), num("dead letters", one.dead_letters), num("pending", one.pending),
      h("td", { class: "text dim" }, worst ? worst.title : ""));
  };
  return [
    h("div", { class: "head" }, h("h1", null, state.of === "this process" ? "This process" : "All groups"), h("span", { class: "dim" }, state.of === "this process" ? "" : "as they report to " + state.of)),
    h("dl", { class: "tiles" },
      tile("Groups", count(state.count)), tile("Members", count(total("living")), total("silent") ? `${total("silent")} silent` : "", total("silent") ? "bad" : ""),
      tile("Lag", lagText(groups.some((one) => one.lag === null) ? null : total("lag"))), tile("Messages/s", count(total("rate"))), tile("In flight", count(total("in_flight"))),
      tile("Problems", count(total("bad")), total("warn") ? `${total("warn")} to look at` : "", total("bad") ? "bad" : total("warn") ? "warn" : "")),
    wanted.length > 0 && card("look", "What needs a look", "", h("ul", { class: "problems" }, wanted.map(([one, group], number) => problemItem(one, group, number)))),
    card("groups", "Groups", shown.length < state.count ? `${shown.length} of ${state.count}` : "",
      shown.length ? table([["Group"], ["State"], ["Members", "num"], ["Partitions", "num"], ["Lag", "num"], ["Messages/s", "num"], ["30 min"], ["In flight", "num"], ["Parked", "num"], ["Dead letters", "num"], ["Pending", "num"], ["First cause"]], shown.map(row))
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

function partitions(group) {
  const shown = group.partitions.filter((one) => matches(place(one), one.member, one.state, one.holds));
  const most = Math.max(1, ...shown.map((one) => one.lag || 0));
  const row = (one) => h("tr", { key: one.member + place(one) },
    h("td", { class: "name" }, h("button", { class: "rowlink", onClick: () => openPartition(one) }, place(one)), known.route.member === undefined && h("small", null, one.member)),
    num("lag", one.lag, one.lag === undefined ? "–" : [count(one.lag), h("svg", { class: "spark", viewBox: "0 0 96 3", "aria-hidden": "true" }, h("rect", { class: "heat2", x: 96 - (96 * (one.lag || 0)) / most, width: (96 * (one.lag || 0)) / most, height: 3 }))], "lag"),
    num("watermark", one.watermark ?? -1, one.watermark === undefined ? "–" : String(one.watermark)), num("gaps", one.gaps), num("in flight", one.in_flight), num("parked", one.parked),
    h("td", { class: "text" + (one.trouble || one.state === "dead letter" || one.state === "held" ? " bad-text" : one.blocking_offset === undefined && !one.paused ? " dim" : "") }, one.holds));
  const all = group.partition_count;
  return card("partitions", "Partitions", shown.length < all ? `the ${shown.length} that most need a look, of ${count(all)}` : count(all),
    shown.length ? table([["Partition"], ["Lag", "num"], ["Watermark", "num"], ["Gaps", "num"], ["In flight", "num"], ["Parked", "num"], ["What holds it"]], shown.map(row)) : h("p", { class: "empty" }, "None."));
}
function members(group) {
  const shown = group.members.filter((one) => matches(one.member, one.host));
  return card("members", "Members", shown.length < group.member_count ? `${shown.length} of ${group.member_count}` : count(group.member_count),
    table([["Member"], ["State"], ["Partitions", "num"], ["Lag", "num"], ["Messages/s", "num"], ["Failed/s", "num"], ["In flight", "num"], ["Workers busy", "num"], ["Parked", "num"], ["Up", "num"]].concat(can("stacks") ? [[""]] : []),
      shown.map((one) => h("tr", { key: one.member, class: one.silent ? "silent" : "" },
        h("td", { class: "name" }, h("a", { href: address(group.name, one.member) }, one.member), h("small", null, `process ${one.process} on ${one.host}`)),
        h("td", { class: "state" }, one.silent ? pill(one.replaced ? "" : "bad", (one.replaced ? "replaced, " : "") + `silent for ${span(one.age)}`) : pill("ok", "reports")),
        num("partitions", one.partition_count), num("lag", one.lag, lagText(one.lag)), num("messages/s", one.rate), num("failed/s", one.failed_rate), num("in flight", one.in_flight),
        num("workers busy", one.busy, one.workers === null || one.workers === undefined ? "–" : `${one.busy} of ${one.workers}`), num("parked", one.parked_keys), num("up", one.uptime, span(one.uptime)),
        can("stacks") && h("td", null, one.commands && action("Stacks", "stacks", { group: group.name, member: one.member }))))));
}
function parked(group) {
  return card("parked", "Parked keys", count(group.parked_keys), group.parked.length
    ? table([["Head"], ["Handler"], ["State"], ["Tries", "num"], ["Since", "num"], ["Next try", "num"]], group.parked.filter((one) => matches(place(one), one.handler, one.key_hash)).map((one) =>
      h("tr", { key: place(one) + one.offset }, h("td", { class: "name" }, h("button", { class: "rowlink", onClick: () => openPartition(one) }, `${place(one)}@${one.offset}`)), h("td", null, one.handler || ""), h("td", null, one.state),
        num("tries", one.attempt), num("since", one.age, span(one.age)), num("next try", one.due_in, one.due_in === undefined ? "not set" : "in " + span(one.due_in)))))
    : h("p", { class: "empty" }, "None."));
}
function deadLetters(group) {
  return card("letters", "Dead letters", many(group.dead_letters.reduce((all, one) => all + one.count, 0), "message") + " since the members' start", group.dead_letters.length
    ? table([["Reason"], ["Messages", "num"], ["Last", "num"]].concat(can("replay") ? [[""]] : []), group.dead_letters.map((one) =>
      h("tr", { key: [one.topic, one.dead_letter_topic, one.error].join("|") }, h("td", { class: "name" }, one.error, h("small", null, `${one.topic} → ${one.dead_letter_topic}`)), num("messages", one.count),
        h("td", { class: "num", "data-label": "last" }, one.offset === undefined || one.offset === null ? span(one.age) + " ago" : [h("button", { class: "rowlink", onClick: () => openPartition(one) }, `${place(one)}@${one.offset}`), h("small", { class: "dim" }, ` ${span(one.age)} ago`)]),
        can("replay") && h("td", null, action("Replay …", "replay", { topic: one.dead_letter_topic }, [["partition", "Partition", "number"], ["offset", "Offset", "number"]])))))
    : h("p", { class: "empty" }, "None since the members' start."));
}
function pauses(group) {
  const now = Object.entries(group.paused), before = Object.entries(group.pauses);
  return card("pauses", "Pauses", now.length ? "" : "none now", h("div", { class: "body" },
    now.map(([why, n]) => h("p", { key: "n" + why }, h("b", null, many(n, "partition")), " now: ", why)),
    before.length > 0 && h("p", { class: "dim", key: "before" }, "since the start: " + before.map(([why, n]) => `${why} ${count(n)}`).join(", ")),
    !now.length && !before.length && h("p", { class: "dim" }, "No partition was paused.")));
}
function transactions(group) {
  const counts = group.coordinators.map((one) => one.counts), total = (name) => counts.reduce((all, one) => all + (one[name] || 0), 0);
  return card("transactions", "Transactions", `${count(total("pending"))} pending, the oldest ${span(Math.max(0, ...counts.map((one) => one.oldest_pending_age || 0)))}`,
    h("div", { class: "body dim" }, `${count(total("committed"))} committed, ${count(total("rolled_back"))} rolled back, ${count(total("discarded"))} discarded, ${count(total("checks"))} checks, ${count(total("no_producer"))} of which reached no producer`,
      resumers(group).map((given) => h("span", { key: given.member || "" }, " ", action("Resume a discarded one …", "resume-transaction", given, (given.group ? [] : [["prefix", "Prefix of the store", "text", "penstock"]]).concat([["transaction_id", "Transaction", "text"]]))))),
    group.transactions.length > 0 && table([["Transaction"], ["Producer group"], ["Topics"], ["Age", "num"], ["Checks", "num"], ["Waits for"]].concat(can("settle") ? [[""]] : []), group.transactions.map((one) =>
      h("tr", { key: one.id }, h("td", { class: "name mono" }, one.id), h("td", { class: "text" }, one.group), h("td", { class: "text" }, one.topics), num("age", one.age, span(one.age)), num("checks", one.checks),
        h("td", { class: "text" }, one.waits_for || "the decision of its producer"),
        can("settle") && h("td", null, settle(one))))));
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
  const inKafka = found.find((one) => !one.group);
  return found.filter((one) => one.group).concat(inKafka ? [inKafka] : []);
}
function sinks(group) {
  const past = Object.entries(known.history.series || {}).filter(([name]) => name.startsWith("batch "));
  return [card("sinks", "Spark queries", "", table([["Query"], ["State"], ["Batch", "num"], ["Rows", "num"], ["Rows/s", "num"], ["Last batch took", "num"], ["Lag", "num"], ["Restarts", "num"], ["Last error"]], group.sinks.map((one) =>
    h("tr", { key: one.name + one.member }, h("td", { class: "name" }, one.name), h("td", null, pill(["running", "standby"].includes(one.state) ? "ok" : one.state === "failed" ? "bad" : "warn", one.state)), num("batch", one.batch_id ?? 0, String(one.batch_id ?? "–")), num("rows", one.rows), num("rows/s", one.rows_per_s),
      num("last batch", one.batch_seconds, span(one.batch_seconds)), num("lag", one.lag), num("restarts", one.restarts), h("td", { class: "text" }, one.last_error || ""))))),
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
      consumes && [tile("Parked keys", count(group.parked_keys), group.held_keys ? `${group.held_keys} held` : "", group.held_keys ? "bad" : ""), tile("Dead letters", count(group.dead_letters.reduce((all, one) => all + one.count, 0)), group.dead_letter_failures ? `${count(group.dead_letter_failures)} refused` : "", group.dead_letter_failures ? "warn" : "")],
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
const can = (name) => known.actions.includes(name);

function openDialog(title, ...kids) {
  patch(dialog, []);
  patch(dialog, [h("h2", { id: "dialog-title" }, title), ...kids]);
  if (!dialog.open) dialog.showModal();
}
const buttons = (...kids) => h("div", { class: "buttons" }, ...kids, h("button", { onClick: () => dialog.close() }, "Close"));
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== undefined && value !== null && value !== "").map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));

function openProblem(one) {
  openDialog(one.title, h("p", null, one.text), facts([["Member", one.member], ["Topic", one.topic], ["Partition", one.partition], ["Offset", one.offset], ["For", one.age === undefined ? undefined : span(one.age)], ["Lag", one.waiting], ["Key hash", one.key_hash]]),
    one.stack && [h("p", { class: "dim" }, "The handler's stack, the call last:"), h("pre", { pre: one.stack })],
    one.stack === null && h("p", { class: "dim" }, "The handler's stack is hidden: --show-messages shows it, or the action Stacks with the token."), h("div", { id: "message" }), buttons(showMessage(one), problemActions(one)));
}
function openPartition(one) {
  const offset = one.blocking_offset ?? one.offset, at = { ...one, offset, member: one.member || known.route.member };
  openDialog(place(one), facts([["What holds it", one.holds], ["Member", one.member], ["Watermark", one.watermark], ["Position", one.position], ["Lag", one.lag], ["Gaps above the watermark", one.gaps], ["In flight", one.in_flight === undefined ? undefined : `${count(one.in_flight)} (${count(one.bytes_in_flight || 0)} bytes)`], ["Parked", one.parked], ["Handler", one.handler], ["Worker", one.worker], ["Error", one.error], ["Key hash", one.key_hash]]),
    h("div", { id: "message" }), buttons(showMessage(at), problemActions({ ...at, kind: one.error ? "" : one.state === "in handler" || one.state === "behind a call" ? "handler" : one.state === "parked" || one.state === "held" ? one.state : "" }), partitionActions(at)));
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
function problemActions(one) {
  const group = known.route.group;
  if (!group) return null;
  const made = [];
  if (one.transaction && can("settle")) made.push(settle(one.transaction));
  if (one.member && heard(one.member)) {
    if (["parked", "held", "keys", "handler"].includes(one.kind) && one.offset !== undefined) made.push(action("Give up", "give-up", { group, member: one.member, topic: one.topic, partition: one.partition, offset: one.offset }));
    if (one.kind === "handler") made.push(action("Stacks", "stacks", { group, member: one.member }));
  }
  return made.filter(Boolean);
}
function partitionActions(one) {
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
async function learnActions() {
  try {
    const answer = await fetch("api/actions");
    const reply = answer.ok ? await answer.json() : {};
    known.actions = reply.enabled ? reply.actions : [];
    draw();
  } catch { known.actions = []; }
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
learnActions();
go();
