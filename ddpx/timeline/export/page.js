// The state of the page: the shown step, its ranks, and the time. All other parts follow from this state.
"use strict";

const recording = JSON.parse(document.getElementById("recording").textContent);
const byId = (id) => document.getElementById(id);

const view = {
  index: recording.shown,
  step: null,
  shown: new Set(), // ranks
  t: 0,
  events: [],
  cards: [],
  playing: false,
  lastFrame: 0,
};
const gantt = new Gantt(byId("gantt"), recording, (t) => { pause(); moveTo(t); });

// ---- time -------------------------------------------------------------------------------------

function moveTo(t) {
  view.t = Math.min(Math.max(t, 0), view.step.length);
  const rounded = Math.round(view.t);
  byId("time").value = rounded;
  byId("clock").textContent = `${milliseconds(rounded)} of ${milliseconds(view.step.length)} ms`;
  gantt.moveTo(view.t);
  for (const card of view.cards) card.moveTo(view.t);
  showNow();
}

function toNextEvent() {
  pause();
  moveTo(view.events[numUntilNow()]?.at ?? view.step.length);
}

function toPreviousEvent() {
  pause();
  moveTo(view.events[countWhile(view.events, (event) => event.at < view.t) - 1]?.at ?? 0);
}

function numUntilNow() {
  return countWhile(view.events, (event) => event.at <= view.t);
}

const MOST_EVENTS = 4;

// Shows the latest events, which have one time, of all shown ranks.
function showNow() {
  const end = numUntilNow();
  const at = end > 0 ? view.events[end - 1].at : null;
  const key = `${view.index} ${at} ${[...view.shown]}`;
  if (view.nowShown === key) return;
  view.nowShown = key;
  const events = [];
  for (let i = end - 1; i >= 0 && view.events[i].at === at; i--) events.unshift(view.events[i]);
  const items = events.slice(0, MOST_EVENTS).map((event) => element("li", {},
    element("b", {}, `${milliseconds(at)} ms, rank ${event.rank}:`), ` ${eventText(recording, event)}`));
  if (events.length > MOST_EVENTS) items.push(element("li", {}, `and ${events.length - MOST_EVENTS} more`));
  byId("now").replaceChildren(...items);
  byId("time").setAttribute("aria-valuetext", at === null ? "before the first event"
    : `${milliseconds(at)} ms: ${events.slice(0, MOST_EVENTS).map((e) => `rank ${e.rank} ${eventText(recording, e)}`).join(", ")}`);
}

function play() {
  if (view.t >= view.step.length) moveTo(0);
  view.playing = true;
  view.lastFrame = performance.now();
  showPlaying();
  requestAnimationFrame(frame);
}

function pause() {
  view.playing = false;
  showPlaying();
}

function showPlaying() {
  byId("play").textContent = view.playing ? "Pause" : "Play";
  byId("play").setAttribute("aria-pressed", view.playing);
  byId("now").setAttribute("aria-live", view.playing ? "off" : "polite");
}

function frame(now) {
  if (!view.playing) return;
  const seconds = Number(byId("speed").value);
  moveTo(view.t + (now - view.lastFrame) / 1000 / seconds * view.step.length);
  view.lastFrame = now;
  if (view.t >= view.step.length) pause();
  else requestAnimationFrame(frame);
}

// ---- step and ranks ---------------------------------------------------------------------------

function showStep(index) {
  pause();
  view.index = Math.min(Math.max(index, 0), recording.steps.length - 1);
  view.step = decodeStep(recording, view.index);
  byId("step").selectedIndex = view.index;
  showInStrip();
  byId("why").textContent = `${view.index === recording.shown ? `${recording.why} ` : ""}${view.step.wait}`;
  byId("previous-step").disabled = view.index === 0;
  byId("next-step").disabled = view.index === recording.steps.length - 1;
  byId("time").max = view.step.length;
  makeRankButtons();
  showRanks();
  const [begin, end] = view.step.ranks.get(shownRanks()[0]).backward;
  moveTo((begin + end) / 2);
}

function makeStrip() {
  const longest = Math.max(...recording.steps.map((step) => step.length));
  byId("strip").append(...recording.steps.map((step, index) => {
    const exposed = Math.max(...Object.values(step.ranks).map((rank) => rank.figures.exposed));
    const text = `step ${step.number}: ${milliseconds(step.length, 1)} ms, ` +
      `${milliseconds(exposed, 1)} ms exposed${index === recording.shown ? "; the median" : ""}`;
    const button = element("button", {type: "button", title: text, "aria-label": text}, element("i"));
    button.style.height = `${100 * step.length / longest}%`;
    button.firstChild.style.height = `${100 * exposed / step.length}%`;
    button.addEventListener("click", () => showStep(index));
    return button;
  }));
}

function showInStrip() {
  [...byId("strip").children].forEach((button, index) => {
    if (index === view.index) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
}

function showRanks() {
  const ranks = shownRanks();
  view.events = eventsOf(view.step, ranks);
  view.cards = ranks.map((rank) => new Card(view.step, rank, recording.hosts[rank]));
  byId("cards").replaceChildren(...view.cards.map((card) => card.element));
  byId("figures").replaceChildren(...figureTables(recording, view.step, [...view.step.ranks.keys()]));
  drawGantt();
  moveTo(view.t);
}

// Draws the bars, and a legend of the colours in use.
function drawGantt() {
  gantt.draw(view.step, shownRanks());
  byId("legend").replaceChildren(...Object.entries(recording.legend).filter(([name]) => gantt.used.has(name)).map(
    ([name, text]) => element("li", {}, element("i", {class: `swatch ${name}`, style: `background-color: var(--${name})`}), text)));
}

// The chosen ranks that recorded this step. Without such a rank, the first rank of the step.
function shownRanks() {
  const there = [...view.step.ranks.keys()];
  const chosen = there.filter((rank) => view.shown.has(rank));
  return chosen.length > 0 ? chosen : there.slice(0, 1);
}

function makeRankButtons() {
  const buttons = [...view.step.ranks.keys()].map((rank) => {
    const button = element("button", {type: "button", "data-rank": rank}, `rank ${rank}`);
    button.addEventListener("click", () => {
      const ranks = shownRanks();
      view.shown = new Set(ranks);
      if (!view.shown.delete(rank)) view.shown.add(rank);
      if (view.shown.size === 0) view.shown.add(rank); // one stays
      showPressed();
      showRanks();
    });
    return button;
  });
  byId("ranks").replaceChildren(...buttons);
  showPressed();
}

function showPressed() {
  const ranks = shownRanks();
  for (const button of byId("ranks").children) {
    button.setAttribute("aria-pressed", ranks.includes(Number(button.dataset.rank)));
  }
}

// ---- tips -------------------------------------------------------------------------------------

function showTip(text, event) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const {clientWidth, clientHeight} = document.documentElement;
  const below = event.clientY + 18;
  const fits = below + tip.offsetHeight < clientHeight;
  tip.style.left = `${Math.max(Math.min(event.clientX + 12, clientWidth - tip.offsetWidth - 8), 8)}px`;
  tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 8}px`;
}

byId("cards").addEventListener("pointermove", (event) => {
  const cell = event.target.closest("i[data-param]");
  const card = cell && view.cards.find((each) => each.element.contains(cell));
  showTip(card && card.tipOf(recording, cell), event);
});
byId("bars").addEventListener("pointermove", (event) => {
  showTip(gantt.textAt(event.clientX, event.clientY), event);
});
for (const id of ["cards", "bars"]) byId(id).addEventListener("pointerleave", () => showTip(null));

// ---- controls ---------------------------------------------------------------------------------

const KEYS = {
  ArrowRight: toNextEvent,
  ArrowLeft: toPreviousEvent,
  Home: () => { pause(); moveTo(0); },
  End: () => { pause(); moveTo(view.step.length); },
  n: () => showStep(view.index + 1),
  p: () => showStep(view.index - 1),
  " ": () => (view.playing ? pause() : play()),
};

document.addEventListener("keydown", (event) => {
  const within = event.target.tagName;
  if (within === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && within === "BUTTON") return; // presses it
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
byId("time").addEventListener("input", (event) => { pause(); moveTo(Number(event.target.value)); });
byId("play").addEventListener("click", KEYS[" "]);
byId("next-event").addEventListener("click", toNextEvent);
byId("previous-event").addEventListener("click", toPreviousEvent);
byId("next-step").addEventListener("click", KEYS.n);
byId("previous-step").addEventListener("click", KEYS.p);
byId("step").addEventListener("change", (event) => showStep(event.target.selectedIndex));

const redraw = () => { drawGantt(); gantt.moveTo(view.t); };
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// ---- the page, once ---------------------------------------------------------------------------

const clockError = Math.max(...Object.values(recording.clockErrors));
byId("about").textContent =
  `${recording.steps.length} ${recording.steps.length === 1 ? "step" : "steps"} of ` +
  `${Object.keys(recording.hosts).length} of ${recording.worldSize} ranks over ${recording.backend}, ` +
  `on ${recording.device}; ${recording.params.length} params` +
  (clockError > 0 ? `; clocks are known to ${clockError.toFixed(0)} µs.` : ".");
document.body.classList.toggle("dense", recording.params.length > 400); // smaller cells
byId("step").append(...recording.steps.map((step) => element("option", {},
  `step ${step.number} (${milliseconds(step.length, 1)} ms)`)));
byId("advice").append(...(recording.advice.length > 0 ? recording.advice : ["Nothing to improve was found."])
  .map((sentence) => element("li", {}, sentence)));
makeStrip();
if (recording.plans) drawPlans(byId("plans"), recording.plans);
view.shown = new Set(recording.detailed);
showStep(view.index);
