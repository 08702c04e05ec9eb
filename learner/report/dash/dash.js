// The page: one view for each address behind the #, drawn from the JSON API. What a model wrote is only ever set as text.
"use strict";
(() => {
  const view = document.getElementById("view"), nav = document.getElementById("nav"), { number } = window.sluicePlots;
  const EVERY_MS = 1000;
  let visit = new AbortController(), timer = 0, isPressed = false;  // visit: of the view that is there; its end stops its requests

  // ---- small helpers
  function h(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {}))
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name === "style") made.style.cssText = value;
      else if (value != null && value !== false) made.setAttribute(name, value === true ? "" : value);
    made.append(...children.flat(3).filter(child => child != null && child !== false));
    return made;
  }
  const card = (...children) => h("div", { class: "card" }, ...children);
  const short = value => value == null ? "" : number(value);
  const percent = share => `${Math.round(100 * share)} %`;
  const clock = seconds => seconds ? new Date(1000 * seconds).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }) : "";
  const link = (...parts) => "#/" + parts.map(encodeURIComponent).join("/");

  function ago(seconds) {
    const passed = Math.max(0, Date.now() / 1000 - seconds);
    return passed < 90 ? `${Math.round(passed)} s ago` : passed < 5400 ? `${Math.round(passed / 60)} min ago` : clock(seconds);
  }

  async function get(path, values) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(values || {}))
      for (const each of Array.isArray(value) ? value : [value]) if (each != null && each !== "") query.append(name, each);
    const answer = await fetch(`/api/${path}?${query}`, { signal: visit.signal }).catch(() => { throw new Error("There is no answer: has sluice dash ended?"); });
    if (answer.ok) return answer.json();
    const text = await answer.text();
    let detail = text;
    try { detail = JSON.parse(text).detail; } catch { /* not JSON */ }
    throw new Error(typeof detail === "string" ? detail : detail.map(each => `${each.loc.at(-1)}: ${each.msg}`).join("; "));
  }

  function table(columns, rows, open, kind) {  // columns: [title, value of a row, "number" or "wide" or ""]
    const cell = (tag, content, kind) => h(tag, { class: kind }, content ?? "");
    return h("div", { class: "scroll" }, h("table", { class: kind },
      h("thead", {}, h("tr", {}, columns.map(([title, , kind]) => cell("th", title, kind)))),
      h("tbody", {}, rows.map(row => {
        const go = open && open(row);
        const line = h("tr", go ? { tabindex: 0, role: "link", "data-key": go, onclick: () => { location.hash = go; }, onkeydown: event => { if (event.key === "Enter" && event.target === line) location.hash = go; } } : {},
          columns.map(([, value, kind]) => cell("td", value(row), kind)));
        return line;
      }))));
  }

  function redraw(place, ...children) {  // the keyboard and opened parts stay where they were; a click and selected text are not disturbed
    const selection = getSelection(), { key } = place.contains(document.activeElement) ? document.activeElement.dataset : {};
    if (isPressed || (!selection.isCollapsed && place.contains(selection.anchorNode))) return;
    const opened = [...place.querySelectorAll("details[open]")].map(each => each.dataset.key);
    place.replaceChildren(...children.flat().filter(child => child));
    for (const each of place.querySelectorAll("[data-key]")) {
      if (opened.includes(each.dataset.key)) each.open = true;
      if (key === each.dataset.key) each.focus({ preventScroll: true });
    }
  }

  function bars(rows) {  // [name, count]
    const most = Math.max(1, ...rows.map(([, count]) => count));
    return h("div", { class: "bars" }, rows.map(([name, count]) =>
      [h("span", {}, name), h("span", {}, h("i", { style: `width: ${100 * count / most}%` })), h("span", { class: "soft" }, short(count))]));
  }

  function plot(drawn) {
    const place = h("div", { class: "drawn" });
    const made = card(h("div", { class: "top" }, h("h3", {}, drawn.title), h("small", { class: drawn.is_outside && "outside" }, drawn.caption)), place);
    return { made, show: () => window.sluicePlots.show(drawn, place) };
  }

  function plots(all) {
    const made = all.map(plot);
    const wide = made.filter((_, i) => all[i].is_wide), others = made.filter((_, i) => !all[i].is_wide);
    return { parts: [...wide.map(each => each.made), h("div", { class: "grid", style: "margin-top: 14px" }, others.map(each => each.made))], show: () => made.forEach(each => each.show()) };
  }

  // ---- views: each returns { parts, show, every } ; every: called once a second while the view is there
  async function listOfRuns() {
    const chosen = new Set(), place = h("div", {}), order = new Map();  // a run keeps its place while the list is there; a new one comes first
    const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = link("compare", ...chosen); } }, "compare");
    const every = async () => {
      const rank = run => order.get(run.name) ?? -1, runs = (await get("runs")).sort((a, b) => rank(a) - rank(b));
      runs.forEach((run, i) => order.set(run.name, i));
      const box = run => h("input", { type: "checkbox", "data-key": `tick ${run.name}`, "aria-label": `compare ${run.name}`, onclick: event => event.stopPropagation(), onchange: event => { chosen[event.target.checked ? "add" : "delete"](run.name); compare.disabled = chosen.size < 2; } });
      const ticked = run => { const made = box(run); made.checked = chosen.has(run.name); return made; };
      redraw(place, runs.length ? card(table([
        ["", ticked, "tick"],
        ["run", run => h("a", { "data-key": `name ${run.name}`, href: link("run", run.name) }, run.name), ""],
        ["state", run => h("span", { class: `state ${run.state}` }, run.state), ""],
        ["step", run => run.max_steps == null ? run.step : `${run.step} of ${run.max_steps}`, "number"],
        ["reward", run => short(run.reward), "number"], ["held-out", run => short(run.held_out), "number"],
        ["alarms", run => run.num_alarms ? h("span", { class: "worse" }, run.num_alarms) : "", "number"],
        ["last write", run => ago(run.changed_at), "number wide"],
      ], runs, run => link("run", run.name))) : card(h("p", {}, "There is no run in this folder yet. Start one with: sluice run")));
    };
    await every();
    return { parts: [h("div", { class: "pager" }, h("span", { class: "soft" }, "Tick two runs or more to draw them over each other."), compare), place], every };
  }

  async function overview(run) {
    const strip = h("div", {}), books = h("div", { style: "margin-top: 14px" }), curves = h("div", {});
    let drawnStep = -1, alarms = -1;
    const every = async () => {
      const live = await get("live", { run });
      redraw(strip, liveStrip(run, live));
      redraw(books, tokenBooks(await get("books", { run }).catch(() => ({ rows: [] }))));
      if (live.summary.step === drawnStep && live.alarms.length === alarms) return;
      [drawnStep, alarms] = [live.summary.step, live.alarms.length];
      const sections = await get("plots", { run });
      window.sluicePlots.forget();
      const made = sections.filter(each => each.plots.length || each.constant.length).map(each => ({ ...each, drawn: plots(each.plots) }));
      curves.replaceChildren(...made.flatMap(each => [h("h2", {}, each.title), ...each.drawn.parts, each.constant.length ? h("p", { class: "soft" }, `Constant: ${each.constant.join(", ")}.`) : ""]));
      made.forEach(each => each.drawn.show());
    };
    return { parts: [strip, books, curves], every, show: every };
  }

  function tokenBooks({ num_generated, rows }) {
    const booked = rows.reduce((sum, each) => sum + each.num_tokens, 0), open = num_generated - booked;
    return rows.length ? [card(h("small", {}, `token books: ${num_generated.toLocaleString()} generated, `, open ? h("span", { class: "worse" }, `${open.toLocaleString()} not in the books`) : "each is counted once"), bars(rows.map(each => [each.what, each.num_tokens])))] : [];
  }

  function liveStrip(run, live) {
    const { summary, newest } = live, parts = [], lost = (live.events || []).filter(each => each.kind === "server_lost").slice(0, 3).reverse();
    const alarms = [...live.alarms.slice(-4).map(alarm => `step ${alarm.step}: ${alarm.text}`), ...lost.map(each => `${clock(each.at)}: ${each.detail}`)];
    parts.push(h("div", { class: "strip" },
      card(h("small", {}, "progress"), h("div", {}, h("span", { class: `state ${summary.state}` }, summary.state), `, step ${summary.step}${summary.max_steps == null ? "" : ` of ${summary.max_steps}`}, policy version ${short(newest.policy_version)}`),
        h("div", { class: "soft" }, `last write ${ago(summary.changed_at)}`),
        live.status && h("div", { class: "soft" }, `window ${live.status.window_used} of ${live.status.window_size} groups, ${live.status.ready} ready${live.status.detail ? `; ${live.status.detail}` : ""}`),
        h("div", {}, h("a", { class: "link", "data-key": "timeline", href: `/api/timeline?${new URLSearchParams({ run })}`, download: `${run}.json` }, "timeline for Perfetto")),
        newest["time/push_pause_s"] == null ? "" : h("div", { class: "soft" }, `newest push: servers paused ${Math.round(1000 * newest["time/push_pause_s"])} ms`)),
      live.states && card(h("small", {}, "prompts by state"), bars(Object.entries(live.states))),
      live.staleness?.length ? card(h("small", {}, "staleness of the newest trained samples (versions)"), bars(live.staleness.map(each => [each.versions, each.samples]))) : "",
      card(h("small", {}, "alarms"), alarms.length ? h("ul", { style: "margin: 4px 0; padding-left: 18px" }, alarms.map(text => h("li", { class: "worse" }, text))) : h("div", {}, "none"))));
    if (live.problem) parts.push(card(h("span", { class: "problem" }, live.problem)));
    if (live.servers?.length) parts.push(card(h("small", {}, "rollout servers, over the last minute of the run"), table([
      ["server", each => each.server, ""], ["newest version", each => each.version, "number"], ...(live.status ? [["requests in the engine", each => live.status.servers[each.server]?.running, "number"], ["samples outside", each => live.status.servers[each.server]?.waiting, "number wide"]] : []), ["tokens/s", each => short(each.tokens_per_s), "number"],
      ["last trajectory", each => ago(each.heard_at), "number wide"], [`of newest ${live.servers.reduce((sum, each) => sum + each.samples, 0).toLocaleString()}`, each => short(each.samples), "number wide"],
    ], live.servers, each => link("run", run, "samples") + `?server=${encodeURIComponent(each.server)}`)));
    if (live.events?.length) parts.push(h("details", { class: "card more", "data-key": "events" }, h("summary", { "data-key": "summary" }, `${live.events.length} newest events`), table([["at", each => clock(each.at), ""], ["event", each => each.kind, ""], ["detail", each => each.detail, "wide"]], live.events)));
    return parts;
  }

  async function steps(run) {
    const place = h("div", {});
    let lines = [];
    const every = async () => {
      const last = lines.at(-1), more = await get("metrics", { run, after: last ? last.step - 1 : -1 });
      if (last && more[0]?.at_s === last.at_s && more.length === 1) return;
      lines = last && more[0]?.at_s === last.at_s ? [...lines, ...more.slice(1)] : await get("metrics", { run });  // all: a resume repeats steps
      redraw(place, stepTable(run, lines));
    };
    await every();
    return { parts: [place], every };
  }

  function stepTable(run, lines) {
    const columns = ["reward/mean", "reward/std", "policy/loss", "policy/grad_norm", "policy/kl_sampler", "policy/entropy", "data/staleness_mean", "length/mean", "time/wait_s", "time/train_s", "time/push_s"].filter(key => lines.some(line => key in line));
    return card(table([["step", line => line.step, "number"], ...columns.map(key => [key, line => short(line[key]), "number"])], lines.slice(-2000).reverse(), line => link("run", run, "samples") + `?step=${line.step}`));
  }

  const FIELDS = [["text", "words", "search"], ["server", "server", "text"], ["step", "step", "number"], ["min_reward", "reward from", "number"], ["max_reward", "to", "number"], ["min_tokens", "tokens from", "number"], ["max_tokens", "to", "number"]];
  const CHOICES = [["finish", "ended by", ["", "answer", "stop", "length", "turns", "context", "time"]], ["kind", "kind", ["", "train", "eval"]],
    ["order", "order", ["newest", "oldest", "reward_desc", "reward_asc", "num_model_tokens_desc", "num_model_tokens_asc", "staleness_desc", "staleness_asc"]]];

  async function samples(run, query) {
    const values = Object.fromEntries(query), offset = Number(values.offset || 0), limit = 50;
    const go = changed => { const next = new URLSearchParams(Object.entries({ ...values, offset: 0, ...changed }).filter(([, value]) => value !== "" && value !== 0)); location.hash = `${link("run", run, "samples")}?${next}`; };
    const form = h("form", { class: "filters", onsubmit: event => { event.preventDefault(); go(Object.fromEntries(new FormData(form))); } },
      FIELDS.map(([name, title, type]) => h("label", {}, title, h("input", { name, type, step: type === "number" && "any", value: values[name] || "" }))),
      CHOICES.map(([name, title, options]) => h("label", {}, title, h("select", { name, onchange: () => form.requestSubmit() }, options.map(option => h("option", { value: option, selected: option === (values[name] || "") }, option.replace("num_model_", "").replace("_", " ") || "any"))))),
      h("button", {}, "filter"), h("button", { type: "button", onclick: () => { location.hash = link("run", run, "samples"); } }, "clear"));
    let found;
    try { found = await get("trajectories", { run, ...values, offset, limit }); } catch (error) { return { parts: [form, problem(error)] }; }
    const { rows, total, is_more, indexed } = found;
    const pager = h("div", { class: "pager" },
      h("button", { type: "button", disabled: offset === 0, onclick: () => go({ offset: Math.max(0, offset - limit) }) }, "back"),
      h("span", {}, total ? `${(offset + 1).toLocaleString()} to ${(offset + rows.length).toLocaleString()} of ${is_more ? "more than " : ""}${total.toLocaleString()}` : "no trajectory has all this"),
      h("button", { type: "button", disabled: offset + limit >= total, onclick: () => go({ offset: offset + limit }) }, "on"),
      indexed < 1 && h("span", { class: "soft" }, `words: ${percent(indexed)} of the recorded samples are indexed so far`));
    const where = row => row.sample == null ? link("run", run, "group", row.group) : link("run", run, "sample", row.sample);
    return { parts: [form, pager, card(table([
      ["group", row => row.group, ""], ["step", row => row.step, "number"], ["reward", row => short(row.reward), "number"], ["tokens", row => row.num_model_tokens, "number"], ["turns", row => row.num_turns, "number wide"],
      ["ended by", row => row.finish, ""], ["versions", row => row.oldest_version === row.newest_version ? row.newest_version : `${row.oldest_version} to ${row.newest_version}`, "number"], ["staleness", row => row.staleness, "number wide"],
      ["server", row => row.server, "wide"], ["seconds", row => (row.finished_at - row.started_at).toFixed(1), "number wide"], ["recorded", row => row.sample == null ? "" : "text", ""],
    ], rows, where)), h("p", { class: "soft" }, "Every trajectory of the ledger is here; report.samples_per_step says how many of a step are recorded with their text.")] };
  }

  async function group(run, name) {
    const { prompt, trajectories, failures, waste, recorded } = await get("group", { run, group: name });
    const ids = new Map(recorded.map(each => [each.sample_index, each.id]));
    const at = seconds => `+${(seconds - told[0][0]).toFixed(1)} s`;
    const told = [
      ...trajectories.flatMap(each => [[each.started_at, `sample ${each.sample_index} leased to ${each.server}, attempt ${each.attempt}`], [each.finished_at, `sample ${each.sample_index} scored ${short(each.reward)}, ended by ${each.finish}`], [each.received_at, `sample ${each.sample_index} in the queue`]]),
      ...failures.map(each => [each.at, `sample ${each.sample_index} failed on ${each.server}, attempt ${each.attempt}: ${each.boundary}: ${each.detail}`]),
      ...waste.map(each => [each.at, `sample ${each.sample_index}: ${each.num_tokens} tokens wasted: ${each.reason}`]),
      ...(prompt ? [[prompt.changed_at, `${prompt.state}${prompt.step == null ? "" : ` in step ${prompt.step}`}${prompt.reason ? `: ${prompt.reason}` : ""}`]] : []),
    ].sort((a, b) => a[0] - b[0]);
    return { parts: [h("h2", {}, `Group ${name}`),
      card(table([["sample", each => each.sample_index, "number"], ["reward", each => short(each.reward), "number"], ["tokens", each => each.num_model_tokens, "number"], ["ended by", each => each.finish, ""], ["server", each => each.server, "wide"], ["attempt", each => each.attempt, "number"], ["staleness", each => each.staleness, "number"], ["recorded", each => ids.has(each.sample_index) ? "text" : "", ""]],
        trajectories, each => ids.has(each.sample_index) && link("run", run, "sample", ids.get(each.sample_index)))),
      recorded.some(each => each.sample_index < 0) && card(h("p", {}, "Recorded samples: ", recorded.map(each => [h("a", { class: "link", href: link("run", run, "sample", each.id) }, `step ${each.step}, ${each.id}`), " "]))),
      h("h2", {}, "What happened"), card(table([["after", each => at(each[0]), "number"], ["at", each => clock(each[0]), "wide"], ["", each => each[1], ""]], told))] };
  }

  const STRIPS = { mask: "author and mask", version: "policy version", logprob: "logprob of the sampler", advantage: "advantage", entropy: "entropy of the learner", gap: "logprob gap of learner and sampler" };
  async function sample(run, id) {
    const found = await get("sample", { run, id });
    const place = h("div", { class: "text mono tokens" }), key = h("p", {});
    const chosen = h("select", { "aria-label": "colour of the tokens", onchange: () => paint(chosen.value) }, Object.entries(STRIPS).filter(([name]) => name === "mask" || (name === "version" ? found.version_spans : name === "logprob" ? found.logprobs : found.learner)).map(([name, title]) => h("option", { value: name }, title)));
    const versions = new Array(found.tokens.length).fill(null);
    for (const [start, end, version] of found.version_spans || []) versions.fill(version, start, end);
    const known = [...new Set(versions.filter(version => version != null))];
    const { learner } = found, gap = i => learner.logprobs[i] - found.logprobs[i];
    const shade = (name, strength) => `color-mix(in srgb, var(--${name}) ${Math.min(80, Math.abs(strength)).toFixed(0)}%, transparent)`, masked = (i, drawn) => found.loss_mask[i] ? drawn : "";
    const colour = { mask: i => found.loss_mask[i] ? "var(--model)" : i < found.num_prompt_tokens ? "var(--prompt)" : "var(--observation)",
      version: i => versions[i] == null ? "" : `color-mix(in srgb, var(--c${known.indexOf(versions[i]) % 6}) 32%, transparent)`,
      logprob: i => found.loss_mask[i] ? `color-mix(in srgb, var(--bad) ${Math.min(80, -16 * found.logprobs[i]).toFixed(0)}%, transparent)` : "",
      advantage: i => masked(i, shade(learner.advantages[i] < 0 ? "bad" : "good", 35 * learner.advantages[i])), entropy: i => masked(i, shade("bad", 25 * learner.entropies[i])), gap: i => masked(i, shade("bad", 400 * gap(i))) };
    const keys = { mask: [["prompt: masked", "var(--prompt)"], ["written by the model: trained", "var(--model)"], ["observation: masked", "var(--observation)"]],
      version: known.map((version, i) => [`version ${version}`, `color-mix(in srgb, var(--c${i % 6}) 32%, transparent)`]), logprob: [["likely", ""], ["unlikely: -5 nats or less", "color-mix(in srgb, var(--bad) 80%, transparent)"]],
      advantage: [["better than its group", shade("good", 80)], ["worse", shade("bad", 80)]], entropy: [["certain", ""], ["3 nats or more", shade("bad", 80)]], gap: [["equal", ""], ["0.2 nats or more apart", shade("bad", 80)]] };
    function paint(name) {
      key.replaceChildren(...keys[name].map(([text, shade]) => h("span", { class: "tag", style: `background: ${shade}` }, text)));
      place.replaceChildren(...found.texts.map((text, i) => h("span", { class: "token", style: `background: ${colour[name](i)}`, title: `token ${i}: id ${found.tokens[i]}${found.loss_mask[i] ? `, logprob ${found.logprobs ? found.logprobs[i] : "?"}, version ${versions[i] ?? "?"}${learner ? `, learner's logprob ${learner.logprobs[i]}, entropy ${learner.entropies[i]}, advantage ${learner.advantages[i]}` : ""}` : ", masked"}` }, visible(text))));
    }
    paint("mask");
    const parts = Object.entries(found.reward_parts).map(([name, value]) => `${name} ${short(value)}`).join(", ");
    const turn = (to, title) => h("a", { class: to == null ? "soft" : "link", href: to == null ? null : link("run", run, "sample", to), rel: title }, title);
    return { parts: [
      h("div", { class: "top" }, h("h2", {}, `Step ${found.step}, `, h("a", { class: "link", href: link("run", run, "group", found.group) }, `group ${found.group}`)), h("span", {}, turn(found.before, "earlier"), " · ", turn(found.after, "later"))),
      card(h("div", { class: "facts" }, [["reward", short(found.reward)], ["parts", parts], ["label", found.label], ["ended by", found.finish], ["staleness", found.staleness], ["tokens", `${found.num_tokens}, trained ${found.loss_mask.reduce((a, b) => a + b, 0)}`]].filter(([, value]) => value !== "" && value != null).map(([name, value]) => h("div", {}, h("small", {}, name), h("b", {}, value))))),
      card(h("div", { class: "top" }, h("label", {}, "colour: ", chosen), key), found.problem && h("p", { class: "soft" }, found.problem), place,
        found.texts.length < found.tokens.length && h("p", { class: "soft" }, `The first ${found.texts.length} of ${found.num_tokens} tokens.`))], keys: { ArrowLeft: found.before, ArrowRight: found.after, to: next => link("run", run, "sample", next) } };
  }
  const visible = text => text.replace(/[\0-\x08\x0b-\x1f]/g, c => String.fromCodePoint(0x2400 + c.charCodeAt(0)));

  async function logs(run, query) {
    const text = query.get("text") || "", place = card();
    const form = h("form", { class: "filters", onsubmit: event => { event.preventDefault(); location.hash = `${link("run", run, "logs")}?text=${encodeURIComponent(form.elements.text.value)}`; } }, h("label", {}, "text", h("input", { name: "text", type: "search", value: text })), h("button", {}, "filter"));
    const every = async () => {
      const entries = await get("logs", { run, text });
      redraw(place, entries.length ? h("div", { class: "log mono" }, entries.map(each => h("div", {}, h("small", {}, `${each.at} ${each.process}`), each.text))) : "No log of this run has such a line.");
    };
    await every();
    return { parts: [form, place], show: () => scrollTo(0, document.body.scrollHeight), every };
  }

  async function settings(run) {
    const { settings: rows, problem } = await get("settings", { run });
    const of = changed => table([["setting", row => h("code", {}, row.name), ""], ["value", row => h("code", {}, row.value), ""]], rows.filter(row => row.is_changed === changed), null, "settings");
    return { parts: problem ? [card(h("span", { class: "problem" }, problem))] : [card(h("h3", {}, "Differ from their default"), of(true)), h("details", { class: "card more" }, h("summary", {}, "have their default"), of(false))] };
  }

  async function compare(...names) {
    const { plots: all, settings: rows } = await get("compare", { run: names });
    const drawn = plots(all);
    return { parts: [h("h2", {}, names.join(", ")), card(h("h3", {}, rows.length ? "Settings that differ" : "No setting differs"), rows.length ? table([["setting", row => h("code", {}, row.name), ""], ...names.map(name => [name, row => h("code", {}, row.values[name]), ""])], rows) : ""), h("div", { style: "margin-top: 14px" }, ...drawn.parts)], show: drawn.show };
  }

  // ---- addresses
  const OF_RUN = { "": ["overview", overview], steps: ["steps", steps], samples: ["samples", samples], logs: ["logs", logs], settings: ["settings", settings] };
  const problem = error => card(h("span", { class: "problem", role: "alert" }, String(error.message)));
  const lost = h("div", {});  // why the view is not renewed
  async function route() {
    visit.abort();
    const mine = visit = new AbortController(), [path, query] = location.hash.replace(/^#\//, "").split("?");
    const [kind, ...rest] = path.split("/").map(decodeURIComponent);
    clearTimeout(timer);
    window.sluicePlots.forget();
    const [run, page = "", item] = rest;
    const dark = h("button", { type: "button", class: "right", onclick: () => { document.documentElement.style.colorScheme = isDark() ? "light" : "dark"; route(); } }, isDark() ? "light" : "dark");
    nav.replaceChildren(h("b", {}, h("a", { href: "#/" }, "Sluice")), kind === "run" ? h("b", {}, run) : "", ...(kind === "run" ? Object.entries(OF_RUN).map(([name, [title]]) => h("a", { href: link("run", run, ...(name ? [name] : [])), "aria-current": name === page && "page" }, title)) : []), dark);
    lost.replaceChildren();
    document.title = `${run ? `${run} · ` : ""}Sluice`;
    try {
      const made = await (kind !== "run" ? kind === "compare" ? compare(...rest) : listOfRuns()
        : page === "group" ? group(run, item) : page === "sample" ? sample(run, item) : OF_RUN[page][1](run, new URLSearchParams(query || "")));
      if (mine !== visit) return;  // another view was asked for meanwhile
      view.replaceChildren(...made.parts.filter(part => part));
      keys = made.keys || null;
      await made.show?.();
      if (made.every) again(mine, made.every);
    } catch (error) { if (mine === visit) view.replaceChildren(problem(error)); }
  }

  function again(mine, every) {
    timer = setTimeout(async () => {
      if (!document.hidden) try { await every(); lost.replaceChildren(); } catch (error) { if (mine === visit && lost.textContent !== error.message) lost.replaceChildren(problem(error)); }
      if (mine === visit) again(mine, every);
    }, EVERY_MS);
  }

  let keys = null;
  const isDark = () => (document.documentElement.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  addEventListener("hashchange", route);
  for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) addEventListener(kind, event => { isPressed = event.buttons % 2 === 1; }, true);  // the left one
  addEventListener("keydown", event => {
    if (/^(INPUT|SELECT)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") { const field = view.querySelector("input[type=search]"); if (field) { event.preventDefault(); field.focus(); } }
    if (keys && keys[event.key] != null) location.hash = keys.to(keys[event.key]);
  });
  nav.after(lost);
  route();
})();
