"use strict";
// Draws the cache after one operation from the data of the page. Texts are put in as texts, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const steps = data.steps;
  const part = (number) => data.parts[number];
  const byId = (id) => document.getElementById(id);
  const SIDES = ["implementation", "model"];
  const SPELLED_POSITIONS = 48; // of one row, drawn one by one
  const LARGE_TREE = 40; // nodes; a larger tree is drawn folded
  const MANY_REQUESTS = 8; // of more, those that an operation does not concern are folded away
  const MANY_HOLDERS = 6;
  let at = -1;
  let othersShown = false;

  function make(tag, className, ...children) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    for (const child of children) if (child !== null && child !== undefined) element.append(child);
    return element;
  }

  function spread(runs) {
    const values = [];
    for (let i = 0; i < runs.length; i += 2) for (let n = 0; n < runs[i + 1]; n++) values.push(runs[i] + n);
    return values;
  }

  function inWords(runs) {
    const words = [];
    for (let i = 0; i < runs.length; i += 2) words.push(runs[i + 1] === 1 ? `${runs[i]}` : `${runs[i]}-${runs[i] + runs[i + 1] - 1}`);
    return words.length > 12 ? `${words.slice(0, 12).join(" ")} and ${words.length - 12} more` : words.join(" ") || "none";
  }

  function runsOf(values) {
    const runs = [];
    for (const value of values) {
      if (runs.length && value === runs[runs.length - 2] + runs[runs.length - 1]) runs[runs.length - 1]++;
      else runs.push(value, 1);
    }
    return runs;
  }

  const colour = (name) => (Object.hasOwn(data.colours, name) ? `var(--c${data.colours[name]})` : "var(--soft)");

  // Pages are kept as changes from one operation to the next.
  let pagesNow = [new Map(), new Map()];

  function followPages() {
    pagesNow = [new Map(), new Map()];
    for (const step of steps.slice(0, at + 1)) {
      step.sides.forEach((side, number) => {
        for (const page of side.gone || []) pagesNow[number].delete(page);
        for (let i = 0; i < side.pages.length; i += 2) pagesNow[number].set(side.pages[i], side.pages[i + 1]);
      });
    }
  }

  const has = (keys, kind, key) => Boolean(keys[kind]) && keys[kind].includes(key);
  const LETTERS = { f: "s-f", w: "s-w", o: "s-o", "-": "s-slack", x: "s-x", ".": "s-none" };
  const SAID = { f: "filled", w: "being written", o: "allocated, empty", "-": "slack", x: "claimed twice", ".": "unused" };

  // Pages

  function lookOf(page, cell) {
    const owners = cell.owners;
    if (page < 0 || page > data.n_pages) return { kind: "bad", who: "no such page" };
    if (owners === null) return { kind: "k-unknown", who: "?" };
    if (owners.length > 1 || (page === 0 && owners.length)) return { kind: "bad", who: owners.map(shortly).join("+") };
    if (owners.length === 0) return page === 0 ? { kind: "k-pad", who: "pad" } : { kind: "bad lost", who: "lost" };
    const [kind, name] = owners[0];
    if (cell.complaint) return { kind: "bad", who: `${shortly(owners[0])}!`, tone: kind === "request" ? colour(name) : "var(--tree)" };
    if (kind === "request") return { kind: "k-request", who: name, tone: colour(name) };
    return kind === "tree" ? { kind: "k-tree", who: SHORT.tree } : { kind: "k-free", who: data.spelled ? "free" : "\u00b7" };
  }

  const SHORT = data.spelled ? { free: "free", tree: "tree" } : { free: "F", tree: "T" };
  const shortly = ([kind, name]) => (kind === "request" ? name : SHORT[kind]);

  function slotsSaid(slots) {
    const counts = new Map();
    for (const letter of slots) counts.set(letter, (counts.get(letter) || 0) + 1);
    return [...counts].map(([letter, count]) => `${count} ${SAID[letter]}`).join(", ");
  }

  // Slots side by side that look the same are one piece, as wide as they are many.
  function piecesOf(page, cell, writes) {
    const pieces = [];
    [...cell.slots].forEach((letter, i) => {
      const hot = writes.has(page * data.page_size + i);
      const last = pieces[pieces.length - 1];
      if (last && last[0] === letter && last[1] === hot) last[2]++;
      else pieces.push([letter, hot, 1]);
    });
    return pieces;
  }

  function drawCell(page, cell, flags) {
    const look = lookOf(page, cell);
    const dense = !data.spelled;
    const td = make("td", `cell ${look.kind}${dense ? " dense" : ""}`);
    if (look.tone) td.style.setProperty("--tone", look.tone);
    if (flags.changed) td.classList.add("changed");
    if (flags.differs) td.classList.add("diff");
    const num = make("span", "num", String(page));
    const who = make("span", "who", look.who);
    const top = make("span", "top", num, who);
    top.setAttribute("aria-hidden", "true");
    const slots = make("span", "slots");
    slots.setAttribute("aria-hidden", "true");
    if (data.spelled) {
      [...cell.slots].forEach((letter, i) => {
        const slot = page * data.page_size + i;
        const token = cell.tokens[i];
        const text = token === null ? "\u00a0" : Array.isArray(token) ? token.join("+") : String(token);
        const box = make("span", `box ${LETTERS[letter]}`, text, make("small", "", String(slot)));
        if (flags.writes.has(slot)) box.classList.add("hot");
        slots.append(box);
      });
    } else {
      for (const [letter, hot, count] of piecesOf(page, cell, flags.writes)) {
        const piece = make("span", `slot ${LETTERS[letter]}${hot ? " hot" : ""}`);
        piece.style.flexGrow = String(count);
        slots.append(piece);
      }
    }
    const facts = [`page ${page}: ${cell.words}`, slotsSaid(cell.slots)];
    if (cell.generation !== undefined) facts.push(`generation ${cell.generation}`);
    if (cell.complaint) facts.push(cell.complaint);
    if (flags.changed) facts.push("changed now");
    if (flags.differs) facts.push("differs from the other side");
    td.title = facts.join("; ");
    td.append(top, slots, make("span", "hidden", facts.join("; ")));
    return td;
  }

  const widthOfCell = data.spelled ? Math.max(58, data.page_size * 27 + 8) : 27;
  const columns = Math.max(1, Math.min(16, Math.floor(500 / (widthOfCell + (data.spelled ? 5 : 2)))));

  // A cell is drawn again only where it does not look as before.
  const drawnCells = [new Map(), new Map()];

  function cellOf(step, number, page, wanted, writes) {
    const changed = number === 0 && has(step.changed, "page", page);
    const differs = has(step.differs, "page", page);
    const first = page * data.page_size;
    const hot = writes.filter((slot) => slot >= first && slot < first + data.page_size);
    const look = `${wanted} ${changed} ${differs} ${hot.join(" ")}`;
    const known = drawnCells[number].get(page);
    if (known && known.look === look) return known.element;
    const element = drawCell(page, part(wanted), { changed, differs, writes: new Set(hot) });
    drawnCells[number].set(page, { look, element });
    if (known && known.element.parentNode) known.element.replaceWith(element);
    return element;
  }

  function drawPages(step, number) {
    const pages = pagesNow[number];
    const numbers = [...pages.keys()].sort((one, two) => one - two);
    const writes = number === 0 ? spread(step.writes) : [];
    const cells = numbers.map((page) => cellOf(step, number, page, pages.get(page), writes));
    const place = byId(`pages-${number}`);
    if (place.dataset.pages !== numbers.join()) {
      place.dataset.pages = numbers.join();
      const body = make("tbody");
      for (let i = 0; i < numbers.length; i += columns) {
        const some = numbers.slice(i, i + columns);
        const head = make("th", "", some.length === 1 ? `${some[0]}` : `${some[0]}-${some[some.length - 1]}`);
        head.scope = "row";
        body.append(make("tr", "", head, ...cells.slice(i, i + columns)));
      }
      const caption = make("caption", "hidden", `Pages of the ${SIDES[number]}, ${columns} a line, each with its owner`);
      place.replaceChildren(make("table", `pages${data.spelled ? "" : " dense"}`, caption, body), make("div"));
    }
    const complaints = numbers.map((page) => part(pages.get(page)).complaint).filter(Boolean);
    place.lastChild.replaceChildren(...complaints.slice(0, 4).map((text) => make("p", "mark bad small", text)));
  }

  function ownersAt(number) {
    const pages = pagesNow[number];
    return (slot) => {
      const page = Math.floor(slot / data.page_size);
      return pages.has(page) ? part(pages.get(page)).words : "no such page";
    };
  }

  // Rows and requests

  function drawRows(step, number) {
    const rows = step.sides[number].rows;
    if (rows === null) return make("p", "soft", "This target does not show its rows.");
    const list = make("ul", "rows");
    for (const [row, words, wrong] of part(rows)) {
      const held = !wrong && words !== "free list";
      const chip = make("li", `chip${wrong ? " wrong" : ""}`, `row ${row}: ${words === "free list" ? "free" : words}`);
      if (held) chip.style.setProperty("--tone", colour(words));
      if (number === 0 && has(step.changed, "row", row)) chip.classList.add("changed");
      if (has(step.differs, "row", row)) chip.classList.add("diff");
      if (has(step.differs, "row", row)) chip.append(make("span", "mark", " \u2260"));
      list.append(chip);
    }
    return list;
  }

  function drawRequests(step, number) {
    const side = step.sides[number];
    if (side.requests === null) return make("p", "soft", "This target does not show its requests.");
    const lines = part(side.requests).map(part);
    if (!lines.length) return make("p", "soft", "No request is in the cache.");
    if (lines.length <= MANY_REQUESTS) return tableOf(step, number, lines, `Requests of the ${SIDES[number]}`);
    const wrong = new Set(step.sides.flatMap((each) => (each.requests === null ? [] : part(each.requests).map(part))).filter((line) => line.complaint).map((line) => line.name));
    const concerned = (line) =>
      step.requests.includes(line.name) || has(step.changed, "request", line.name) || has(step.differs, "request", line.name) || wrong.has(line.name);
    const others = lines.filter((line) => !concerned(line));
    const folded = make("details", "", make("summary", "", `${others.length} requests that this operation does not concern`));
    const fill = () => {
      if (folded.open && folded.children.length === 1) folded.append(tableOf(step, number, others, `Other requests of the ${SIDES[number]}`));
    };
    folded.addEventListener("toggle", () => {
      othersShown = folded.open;
      fill();
    });
    folded.open = othersShown;
    fill();
    const some = lines.filter(concerned);
    return make("div", "", some.length ? tableOf(step, number, some, `Requests of the ${SIDES[number]}`) : null, others.length ? folded : null);
  }

  function tableOf(step, number, lines, caption) {
    const head = make("tr");
    for (const title of ["Request", "Positions of its row, each with token and slot"]) {
      const th = make("th", "", title);
      th.scope = "col";
      head.append(th);
    }
    const body = make("tbody");
    const owner = ownersAt(number);
    const writes = number === 0 ? new Set(spread(step.writes)) : new Set();
    for (const line of lines) {
      const row = line.row === null ? "no row" : `row ${line.row}`;
      const th = make("th", "", line.name, make("small", "", line.state === "IN_FLIGHT" ? "IN FLIGHT" : line.state), make("small", "", row));
      th.scope = "row";
      th.style.setProperty("--tone", colour(line.name));
      const tr = make("tr", "", th, make("td", "", ...drawRow(line, owner, writes)));
      if (number === 0 && has(step.changed, "request", line.name)) {
        tr.classList.add("changed");
        th.append(make("small", "", "changed now"));
      }
      if (has(step.differs, "request", line.name)) {
        tr.classList.add("diff");
        th.append(make("small", "mark", "\u2260 differs"));
      }
      body.append(tr);
    }
    return make("table", "requests", make("caption", "hidden", caption), make("thead", "", head), body);
  }

  function intervalsOf(line, length) {
    if (line.lengths === null) return [["", "row", 0, length]];
    const [protectedLen, committed, allocated] = line.lengths;
    const found = [
      ["protected", "protected", 0, protectedLen],
      ["committed", "committed", protectedLen, committed],
      ["open", "allocated", committed, allocated],
      ["past", "beyond allocated", allocated, length],
    ];
    return found.filter(([, , start, end]) => end > start);
  }

  function drawRow(line, owner, writesNow) {
    const slots = spread(part(line.slots));
    const wrong = new Set(spread(line.wrong));
    const writes = new Set(spread(line.writes));
    const text = line.text === null ? [] : data.texts[line.text];
    const [protectedLen, committed, allocated] = line.lengths || [0, slots.length, slots.length];
    const said = make("span", "soft small", `protected ${protectedLen}, committed ${committed}, allocated ${allocated}`);
    const length = Math.max(slots.length, allocated);
    if (length > SPELLED_POSITIONS) return [said, ...drawBar(line, slots, wrong, writes, length)];
    const spans = make("div", "spans");
    for (const [kind, name, start, end] of intervalsOf(line, length)) {
      const boxes = make("span", "boxes");
      for (let pos = start; pos < end; pos++) {
        const slot = slots[pos];
        const known = pos < text.length ? String(text[pos]) : "\u00a0";
        const letter = pos < committed ? "s-f" : writes.has(pos) ? "s-w" : "s-o";
        const box = make("span", `box ${slot === undefined ? "s-none" : letter}`, known, make("small", "", slot === undefined ? "-" : String(slot)));
        const facts = [`position ${pos}`, slot === undefined ? "no slot" : `slot ${slot}, owned by ${owner(slot)}`];
        if (writes.has(pos)) facts.push("being written");
        if (wrong.has(pos)) {
          box.classList.add("wrong");
          facts.push("wrong owner");
        } else if (writesNow.has(slot) && pos >= protectedLen) box.classList.add("hot");
        box.title = facts.join("; ");
        boxes.append(box);
      }
      const group = make("span", `span ${kind}`, make("span", "label", `${name} [${start}, ${end})`), boxes);
      if (kind !== "protected" && kind !== "past") group.style.setProperty("--tone", colour(line.name));
      spans.append(group);
    }
    return [said, spans, complaintOf(line)];
  }

  function complaintOf(line) {
    if (!line.complaint) return null;
    const count = spread(line.wrong).length;
    const more = count > 1 ? ` (and ${count - 1} more such position${count > 2 ? "s" : ""})` : "";
    return make("p", "mark bad small", line.complaint + more);
  }

  function drawBar(line, slots, wrong, writes, length) {
    const bar = make("div", "bar");
    bar.style.setProperty("--own", colour(line.name));
    bar.setAttribute("aria-hidden", "true");
    const list = make("ul", "small");
    for (const [kind, name, start, end] of intervalsOf(line, length)) {
      const piece = make("span", kind);
      piece.style.flex = `${end - start} 1 0`;
      bar.append(piece);
      list.append(make("li", "", `${name} [${start}, ${end}): slots ${inWords(runsOf(slots.slice(start, end)))}`));
    }
    if (writes.size) list.append(make("li", "", `being written: positions ${inWords(runsOf(writes))}`));
    if (wrong.size) list.append(make("li", "mark bad", `wrong: positions ${inWords(runsOf(wrong))}`));
    return [bar, list, complaintOf(line)];
  }

  // Tree

  function drawTree(step, number) {
    const side = step.sides[number];
    if (side.nodes === null) return make("p", "soft", "This target does not show its tree.");
    const nodes = part(side.nodes).map(part);
    if (!nodes.length) return make("p", "soft", "The tree is empty.");
    const folded = nodes.length > LARGE_TREE;
    const root = make("ul", "");
    const open = [root];
    const tops = [];
    nodes.forEach((node, i) => {
      const drawn = drawNode(step, number, node);
      const item = make("li");
      const below = i + 1 < nodes.length && !nodes[i + 1].off && nodes[i + 1].depth > node.depth;
      tops.length = node.depth;
      if (drawn.marked) for (const top of tops) if (top) top.open = true;
      if (below) {
        const list = make("ul");
        const details = make("details", "", make("summary", "", drawn.element), list);
        details.open = !folded;
        item.append(details);
        open[node.depth + 1] = list;
        tops[node.depth] = details;
      } else {
        item.append(drawn.element);
        tops[node.depth] = null;
      }
      open[node.depth].append(item);
    });
    return make("div", "tree", make("span", "soft small", "root"), root);
  }

  function drawNode(step, number, node) {
    const slots = spread(part(node.slots));
    const units = part(node.units);
    const element = make("span", "node");
    const pages = [...new Set(slots.map((slot) => Math.floor(slot / data.page_size)))];
    if (data.spelled && units.length <= 16) {
      const boxes = make("span", "boxes");
      units.forEach((unit, i) => boxes.append(make("span", "box s-f", String(unit), make("small", "", i < slots.length ? String(slots[i]) : "-"))));
      element.append(boxes, make("span", "", `page ${inWords(runsOf(pages))}`));
    } else {
      const more = node.n_units > 8 ? ` .. (${node.n_units} tokens)` : "";
      element.append(make("span", "", `tokens ${units.slice(0, 8).join(" ")}${more}`), make("span", "", `page ${inWords(runsOf(pages))}`));
    }
    const lockers = node.locked_by || [];
    const wrongLock = node.locked_by !== null && node.lock !== lockers.length;
    const holders = lockers.length ? ` by ${lockers.slice(0, MANY_HOLDERS).join(" ")}${lockers.length > MANY_HOLDERS ? ` and ${lockers.length - MANY_HOLDERS} more` : ""}` : "";
    const lock = wrongLock ? `lock count ${node.lock}, but locked${holders || " by nobody"}` : node.lock ? `lock ${node.lock}${holders}` : "not locked";
    element.append(make("span", `chip${node.lock || wrongLock ? " locked" : " soft"}${wrongLock ? " bad" : ""}`, lock));
    if (node.namespace) element.append(make("span", "", node.namespace));
    if (node.hits !== null) element.append(make("span", "soft", `hits ${node.hits}`));
    if (node.priority) element.append(make("span", "soft", `priority ${node.priority}`));
    const changed = number === 0 && has(step.changed, "node", node.key);
    const differs = has(step.differs, "node", node.key);
    if (node.off) element.append(make("span", "mark bad", "off the tree"));
    if (wrongLock || node.off) element.classList.add("wrong");
    if (changed) element.classList.add("changed");
    if (changed) element.append(make("span", "hidden", "changed now"));
    if (differs) element.classList.add("diff");
    if (differs) element.append(make("span", "mark", "\u2260 differs"));
    return { element, marked: has(step.changed, "node", node.key) || differs || wrongLock || node.off };
  }

  // Sizes

  function drawSizes(step) {
    const head = make("tr");
    for (const title of ["", "implementation reports", "counted there", "model"]) {
      const th = make("th", "", title);
      th.scope = "col";
      head.append(th);
    }
    const body = make("tbody");
    const [here, model] = step.sides.map((side) => part(side.sizes));
    here.forEach(([name, reported, counted], i) => {
      const th = make("th", "", name);
      th.scope = "row";
      const tr = make("tr", "", th);
      for (const value of [reported, counted, model[i][1]]) tr.append(make("td", "", value === null ? "-" : String(value)));
      const wrong = reported !== null && counted !== null && reported !== counted;
      if (wrong) tr.append(make("td", "mark bad", "does not recount"));
      if (has(step.differs, "size", name)) {
        tr.classList.add("diff");
        tr.append(make("td", "mark", "\u2260 differs"));
      }
      body.append(tr);
    });
    return make("table", "sizes", make("caption", "hidden", "Sizes in slots and rows"), make("thead", "", head), body);
  }

  // The point of no return: a bar for each operation, above its place on the slider

  const columnsOfChances = [];

  function chanceOf(number) {
    const [failed, tried] = data.chances.points[number + 1];
    if (!tried) return "No continuation was tried after this operation.";
    return `${failed} of ${tried} continuations from after this operation break the same law (${Math.round((100 * failed) / tried)} %).`;
  }

  function drawChances() {
    const { points, turn } = data.chances;
    const last = Math.max(steps.length - 1, 1);
    points.slice(1).forEach(([failed, tried], i) => {
      const share = make("span", tried ? "share" : "share untried");
      share.style.height = `${tried ? (100 * failed) / tried : 100}%`;
      const column = make("span", `column${i >= turn ? " after" : ""}`, share);
      column.dataset.step = String(i);
      column.style.left = `${(100 * i) / last}%`;
      column.style.width = `${100 / last}%`;
      column.title = `operation ${i}: ${steps[i].op}. ${chanceOf(i)}`;
      columnsOfChances.push(column);
    });
    const mark = make("span", `turning${turn > last / 2 ? " leftwards" : ""}`, make("span", "", turn > last / 2 ? `op ${turn} \u25bc` : `\u25bc op ${turn}`));
    mark.style.left = `${(100 * turn) / last}%`;
    const scale = make("span", `scale${turn > last / 2 ? "" : " right"}`, "100 %");
    byId("chances").append(scale, ...columnsOfChances, mark);
    byId("chances").addEventListener("click", (event) => {
      const column = event.target.closest("[data-step]");
      if (column) show(Number(column.dataset.step));
    });
    byId("turn").addEventListener("click", toTurn);
    byId("shares").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) show(Number(button.dataset.step));
    });
    const button = byId("ops").querySelector(`[data-step="${turn}"]`);
    button.append(" ", make("span", "tag turned", data.chances.stands_out ? "no return" : "jump"));
  }

  // The whole

  function fillList(id, lines, none) {
    const list = byId(id);
    list.replaceChildren(...(lines.length ? lines.map((line) => make("li", "", line)) : [make("li", "none", none)]));
  }

  function show(number) {
    if (!steps.length) return;
    const wanted = Math.min(Math.max(number, 0), steps.length - 1);
    if (wanted === at) return;
    at = wanted;
    followPages();
    const step = steps[at];
    byId("slider").value = String(at);
    byId("slider").setAttribute("aria-valuetext", `operation ${at}: ${step.op}`);
    for (const button of byId("ops").querySelectorAll("button")) {
      const here = Number(button.dataset.step) === at;
      if (here) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
      if (here) keepInView(button);
    }
    byId("now").classList.toggle("wrong", step.wrong);
    byId("chance").textContent = data.chances ? chanceOf(at) : "";
    for (const column of columnsOfChances) column.classList.toggle("here", Number(column.dataset.step) === at);
    const writing = step.writing.length ? ` Write set: ${step.writing.join("; ")}.` : "";
    byId("now-head").replaceChildren(make("span", "", `Operation ${at}: ${step.op}`), make("span", "gave", step.gave));
    byId("meaning").textContent = `${data.meanings[step.kind]}${writing}`;
    byId("note").hidden = !step.note;
    byId("note").textContent = step.note;
    const lines = part(step.lines);
    const differences = part(step.differences);
    fillList("lines", lines, "nothing that can be seen");
    fillList("differences", differences, step.note ? "not compared here" : "in nothing");
    const wrong = step.wrong ? ` ${document.querySelector("header .said").textContent}` : "";
    byId("live").textContent = `Operation ${at} of ${steps.length}: ${step.op}, ${step.gave}.${wrong} ${byId("chance").textContent} ${lines.slice(0, 4).join(". ")}`;
    for (const side of [0, 1]) {
      drawPages(step, side);
      byId(`requests-${side}`).replaceChildren(drawRows(step, side), drawRequests(step, side));
      byId(`nodes-${side}`).replaceChildren(drawTree(step, side));
    }
    byId("sizes").replaceChildren(drawSizes(step));
    for (const head of document.querySelectorAll(".of-model")) {
      head.textContent = step.behind ? "Model, before this operation" : "Model (what should be)";
    }
    byId("first").disabled = byId("back").disabled = at === 0;
    byId("last").disabled = byId("next").disabled = at === steps.length - 1;
  }

  function keepInView(button) {
    const list = byId("ops");
    const above = button.offsetTop - list.offsetTop;
    if (above < list.scrollTop) list.scrollTop = above;
    else if (above + button.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = above + button.offsetHeight - list.clientHeight;
  }

  const firstWrong = steps.findIndex((step) => step.wrong);
  const jump = () => firstWrong >= 0 && show(firstWrong);
  const toTurn = () => data.chances && show(data.chances.turn);
  const MOVES = {
    ArrowLeft: () => show(at - 1),
    ArrowRight: () => show(at + 1),
    Home: () => show(0),
    End: () => show(steps.length - 1),
    w: jump,
    t: toTurn,
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !Object.hasOwn(MOVES, event.key)) return;
    event.preventDefault();
    MOVES[event.key]();
  });
  byId("slider").addEventListener("input", (event) => show(Number(event.target.value)));
  byId("first").addEventListener("click", () => show(0));
  byId("back").addEventListener("click", () => show(at - 1));
  byId("next").addEventListener("click", () => show(at + 1));
  byId("last").addEventListener("click", () => show(steps.length - 1));
  byId("wrong").addEventListener("click", jump);
  byId("ops").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) show(Number(button.dataset.step));
  });

  function drawLegend() {
    const sample = (className, text, tone) => {
      const element = make("span", `sample ${className}`, text);
      element.setAttribute("aria-hidden", "true");
      if (tone) element.style.setProperty("--tone", tone);
      return element;
    };
    const own = "var(--c0)";
    const entries = [
      [sample("cell k-free", data.spelled ? "free" : "\u00b7"), "free"],
      [sample("cell k-tree", data.spelled ? "tree" : "T"), "radix tree"],
      [sample("cell k-request", "r", own), "a request, by name"],
      [sample("cell k-pad", ""), "padding"],
      [sample(data.spelled ? "box s-f" : "s-f", "", own), "slot with keys and values"],
      [sample(data.spelled ? "box s-w" : "s-w", "", own), "in flight, being written"],
      [sample(data.spelled ? "box s-o" : "s-o", "", own), "allocated, empty"],
      [sample("bad", ""), "two owners, or wrong"],
      [sample("bad lost", ""), "nobody's: lost"],
      [sample("changed", "\u2022"), "changed by this operation"],
      [sample("diff", "\u2260"), "differs from the model"],
    ];
    if (data.spelled) entries.splice(4, 0, [make("span", "box s-f", "17", make("small", "", "4")), "token 17 in slot 4"]);
    byId("legend").replaceChildren(...entries.map(([element, text]) => make("li", "", element, text)));
  }

  // The list of operations ends where the window does while the head of the page, of one to four lines, is in it.
  function fitList() {
    const here = byId("ops").querySelector("[aria-current]");
    document.documentElement.style.setProperty("--head", `${document.querySelector("header").offsetHeight}px`);
    if (here) keepInView(here);
  }

  fitList();
  new ResizeObserver(fitList).observe(document.querySelector("header"));
  drawLegend();
  if (data.chances) drawChances();
  for (const [i, step] of steps.entries()) if (step.refused) byId("ops").querySelector(`[data-step="${i}"]`).classList.add("refused");
  show(firstWrong >= 0 ? firstWrong : steps.length - 1);
})();
