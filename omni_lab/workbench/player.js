import { positionOf, wallOf } from "./playout.js";
import { button, clockText, element, icon, refill } from "./dom.js";
import { chunkUnder, draw, readout, secondsAt, xOf } from "./lanes.js";
import { chunkFacts, differenceFacts, takeRows, trialControls } from "./panels.js";
import { Deck } from "./deck.js";

const MODES = [
  ["speech", "Speech", "The speech without the waits between its chunks"],
  ["received", "As received", "From the moment of the request, with the true arrival times: waits and gaps included"],
  ["difference", "B − A", "The difference signal, made louder"],
  ["abx", "Blind ABX", "Do you hear which is which?"],
];
const NOTHING =
  "There is no take to play: this run kept no audio. Run it with results.save_audio, as in --set results.save_audio=2.";
const KEYS = "space plays · ← → move · a b compare · [ ] chunks · drag selects · ctrl+wheel zooms";
const SPEEDS = [0.5, 0.75, 1, 1.25, 1.5, 2];
const ROLES = ["ink", "soft", "line", "tint", "paper", "blue", "orange", "vermilion", "purple"];

/** One view of the player. */
class Player {
  constructor(model, root, deck) {
    Object.assign(this, { model, root, deck });
    /** Seconds of the axis that are seen, counted from the first audio; null: fitted to the take. */
    this.zoomed = null;
    this.hover = null;
    this.build();
  }

  set(values) {
    for (const [name, value] of Object.entries(values)) this.model.set(name, value);
    this.model.save_changes();
  }

  get(name) {
    return this.model.get(name);
  }

  build() {
    this.playButton = button("Play", () => this.set({ playing: !this.get("playing") }), { class: "play" });
    this.clock = element("output", { class: "clock", "aria-label": "Position and length" });
    this.modes = MODES.map(([mode, label, hint]) => button(label, () => this.set({ mode }), { title: hint }));
    this.speed = element(
      "select",
      { "aria-label": "Speed", title: "Speed; the pitch stays, but in comparisons it follows" },
      ...SPEEDS.map((speed) => element("option", { value: speed }, `${speed}×`)),
    );
    this.speed.onchange = () => this.set({ speed: Number(this.speed.value) });
    this.loopButton = button("Loop (l)", () => this.set({ loop: !this.get("loop") }), {}, icon("loop"));
    this.canvas = element("canvas");
    this.head = element("i", { class: "head" });
    const slider = { role: "slider", tabindex: 0, "aria-label": "Position in the speech", "aria-valuemin": 0 };
    this.stage = element("div", { class: "stage", ...slider }, this.canvas, this.head);
    this.probe = element("i", { class: "probe", "aria-hidden": "true" });
    this.words = element("blockquote");
    this.note = element("span");
    const foot = element("p", { class: "note" }, element("span", { class: "keys" }, KEYS), this.note);
    this.inspector = element("div", { class: "inspector" });
    this.report = element("div", { class: "report", "aria-live": "polite" });
    const limits = { type: "range", min: 0, max: 90, step: 1, "aria-label": "Gain of the difference in dB" };
    this.gain = element("input", { ...limits, oninput: () => this.set({ gain_db: Number(this.gain.value) }) });
    this.gainText = element("output");
    this.gainRow = element("label", {}, "heard and drawn with", this.gain, this.gainText);
    this.panel = element("div", { class: "panel" }, this.report, this.gainRow);
    this.list = element("div", { class: "takes", role: "radiogroup", "aria-label": "Takes" });
    this.empty = element("p", { class: "empty" }, NOTHING);
    const bar = element(
      "div",
      { class: "bar" },
      button("To the start (home)", () => this.deck.seekClock(0), {}, icon("start")),
      this.playButton,
      this.clock,
      element("div", { class: "modes", role: "group", "aria-label": "What is played" }, ...this.modes),
      this.speed,
      this.loopButton,
      element(
        "div",
        { class: "zoom", role: "group", "aria-label": "Zoom" },
        button("Zoom out", () => this.zoom(2), {}, icon("less")),
        button("Zoom in", () => this.zoom(0.5), {}, icon("more")),
        button("Show all", () => this.look(null), {}, icon("fit")),
      ),
    );
    this.body = element("div", {}, this.words, bar, this.stage, foot, this.inspector, this.panel, this.list);
    this.root.replaceChildren(this.empty, this.body, this.probe);
    this.listen();
  }

  listen() {
    this.root.onkeydown = (event) => this.key(event);
    const x = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    const y = (event) => event.clientY - this.canvas.getBoundingClientRect().top;
    let pressed = null;
    this.stage.onpointerdown = (event) => {
      if (event.button !== 0) return;
      const chunk = chunkUnder(this.scene, this.width, x(event), y(event));
      if (chunk) this.deck.hear(chunk);
      else {
        pressed = x(event);
        this.stage.setPointerCapture(event.pointerId);
      }
    };
    this.stage.onpointermove = (event) => {
      this.hover = secondsAt(this.scene.view, this.width, x(event));
      this.stage.classList.toggle("over-chunk", Boolean(chunkUnder(this.scene, this.width, x(event), y(event))));
      if (pressed !== null && Math.abs(x(event) - pressed) > 4) this.select(pressed, x(event));
      this.say();
    };
    this.stage.onpointerup = (event) => {
      const clicked = pressed !== null && Math.abs(x(event) - pressed) <= 4;
      if (clicked) this.seekAxis(secondsAt(this.scene.view, this.width, pressed));
      pressed = null;
    };
    this.stage.onpointerleave = () => {
      this.hover = null;
      this.say();
    };
    this.stage.ondblclick = () => this.set({ region: [] });
    this.stage.onwheel = (event) => {
      if (!event.ctrlKey && !event.altKey && !event.shiftKey) return;
      event.preventDefault();
      const [from, to] = this.scene.view;
      if (event.shiftKey) this.pan(((event.deltaY || event.deltaX) / this.width) * (to - from));
      else this.zoom(2 ** (event.deltaY / 240), secondsAt(this.scene.view, this.width, x(event)));
    };
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input")) return;
    if (event.key === " " && event.target.matches("button")) return;
    const step = event.shiftKey ? 0.05 : 0.5, takes = this.deck.takes.length, chunks = this.deck.plan?.chunks ?? [];
    const neighbour = (by) => chunks[Math.max(0, chunks.findIndex(({ index }) => index === this.get("chunk"))) + by];
    const actions = {
      " ": () => this.set({ playing: !this.get("playing") }),
      ArrowLeft: () => this.deck.seek(this.deck.positionS - step),
      ArrowRight: () => this.deck.seek(this.deck.positionS + step),
      ArrowUp: () => this.pick((this.get("current") + takes - 1) % takes),
      ArrowDown: () => this.pick((this.get("current") + 1) % takes),
      Home: () => this.deck.seekClock(0),
      End: () => this.deck.seek(this.deck.durationS),
      Escape: () => this.set({ region: [], chunk: -1 }),
      "[": () => neighbour(-1) && this.deck.hear(neighbour(-1)),
      "]": () => neighbour(1) && this.deck.hear(neighbour(1)),
      a: () => this.listenTo("a"),
      b: () => this.listenTo("b"),
      x: () => this.listenTo("x"),
      l: () => this.set({ loop: !this.get("loop") }),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || !takes) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  /** A or B, at the same position; in a blind test X too. */
  listenTo(which) {
    if (this.get("mode") === "abx") this.set({ heard: which });
    else if (which !== "x") this.pick(this.get(which));
    else if (this.deck.takes.length > 1) this.set({ mode: "abx", heard: "x" });
  }

  pick(index) {
    const mode = this.get("mode");
    this.set({ current: index, ...(mode === "received" ? {} : { mode: "speech" }) });
  }

  get width() {
    return this.canvas.clientWidth;
  }

  /** Whether the axis counts from the request, with waits and silences, or is the position in the speech. */
  get onWall() {
    return this.deck.onWall;
  }

  /** A moment of the clock on the axis, which is the wall clock also where the speech is played without its gaps. */
  axisOf(clockS) {
    return this.get("mode") === "speech" ? wallOf(this.deck.plan.segments, clockS) : clockS;
  }

  /** Goes where somebody clicked; a click outside of the region gives it up. */
  seekAxis(seconds) {
    const { segments } = this.deck.plan, { region } = this.scene;
    if (region && (seconds < region[0] || seconds > region[1])) this.set({ region: [] });
    this.deck.seekClock(this.get("mode") === "speech" ? positionOf(segments, seconds) : seconds);
  }

  select(x0, x1) {
    const times = [Math.min(x0, x1), Math.max(x0, x1)].map((x) => secondsAt(this.scene.view, this.width, x));
    const region = this.onWall
      ? times.map((seconds) => positionOf(this.deck.plan.segments, seconds))
      : times.map((seconds) => Math.min(Math.max(0, seconds), this.deck.durationS));
    if (region[1] - region[0] > 0.005) this.set({ region });
  }

  /** The whole of the axis: a wait for the first audio that would dwarf the speech is cut to a third of it. */
  get whole() {
    const { startS, stopS } = this.onWall ? this.deck.plan : { startS: 0, stopS: this.deck.durationS };
    const length = Math.max(stopS - startS, 0.05);
    return [startS <= 1.5 * length ? -startS : -0.33 * length, 1.02 * length];
  }

  get view() {
    const origin = this.onWall ? this.deck.plan.startS : 0;
    return (this.zoomed ?? this.whole).map((seconds) => seconds + origin);
  }

  look(zoomed) {
    this.zoomed = zoomed;
    this.update();
  }

  zoom(factor, around = this.axisOf(this.deck.clockS)) {
    const origin = this.onWall ? this.deck.plan.startS : 0, center = around - origin;
    const [from, to] = this.zoomed ?? this.whole, [least, most] = this.whole;
    const middle = Math.min(Math.max(center, from), to);
    const span = Math.max((to - from) * factor, 0.01);
    if (span >= most - least) return this.look(null);
    const begin = Math.min(Math.max(middle - ((middle - from) / (to - from)) * span, least), most - span);
    this.look([begin, begin + span]);
  }

  pan(by) {
    if (this.zoomed === null) return;
    const [least, most] = this.whole, [from, to] = this.zoomed;
    const shift = Math.min(Math.max(by, least - from), most - to);
    this.look([from + shift, to + shift]);
  }

  get scene() {
    const { deck } = this, mode = this.get("mode"), { plan, material } = deck;
    const region = this.get("region");
    return {
      view: this.view,
      samples: material.samples,
      sampleRate: material.sampleRate,
      blocks: material.blocks,
      gain: mode === "difference" ? 10 ** (this.get("gain_db") / 20) : this.scale,
      segments: this.onWall ? plan.segments : deck.segments,
      color: mode === "difference" ? this.paint("purple") : deck.takes[deck.index].color,
      plan: this.onWall ? plan : null,
      timed: deck.takes[deck.index].arrivals_ms.length > 0,
      chunk: this.get("chunk"),
      region: !region.length ? null : this.onWall ? region.map((s) => wallOf(plan.segments, s)) : region,
      veil: this.veil,
    };
  }

  get veil() {
    if (this.get("mode") === "abx") return "blind: the waveform would give the answer away";
    return this.deck.durationS > 0 ? null : "this answer has no speech";
  }

  /** All takes are drawn to one scale, on which the loudest fills its lane. */
  get scale() {
    return 0.95 / Math.max(...this.deck.takes.map((take) => take.peak), 1e-3);
  }

  paint(role) {
    return this.colors[role];
  }

  /** Canvas knows no CSS variables: each is looked up through an element that has it as its colour. */
  readColors() {
    this.colors = {};
    for (const role of ROLES) {
      this.probe.style.color = `var(--${role})`;
      this.colors[role] = getComputedStyle(this.probe).color;
    }
  }

  /** Shows all that the model says. */
  update() {
    const { deck } = this, any = deck.takes.length > 0;
    this.empty.hidden = any;
    this.body.hidden = !any;
    if (!any || !this.width) return;
    if (this.drawnOnWall !== this.onWall) this.zoomed = this.hover = null;
    this.drawnOnWall = this.onWall;
    this.readColors();
    const mode = this.get("mode"), playing = this.get("playing"), several = deck.takes.length > 1;
    this.words.textContent = deck.takes[mode === "abx" ? deck.at("a") : deck.index].text;
    this.words.hidden = !this.words.textContent;
    this.playButton.replaceChildren(icon(playing ? "pause" : "play"));
    this.playButton.title = this.playButton.ariaLabel = playing ? "Pause (space)" : "Play (space)";
    this.modes.forEach((made, i) => {
      made.setAttribute("aria-pressed", MODES[i][0] === mode);
      made.hidden = !several && i > 1;
    });
    this.modes[1].disabled = !deck.takes[deck.index].arrivals_ms.length;
    this.speed.value = String(this.get("speed"));
    this.loopButton.setAttribute("aria-pressed", this.get("loop"));
    this.showPanels(mode);
    draw(this.canvas, this.scene, (role) => this.paint(role));
    this.move();
    this.say();
  }

  /** Puts the playhead where the clock stands; cheap, called for every frame while playing. */
  move() {
    const { deck } = this, clockS = deck.clockS, at = this.axisOf(clockS);
    const [from, to] = this.view;
    if (this.get("playing") && this.zoomed !== null && (at > to || at < from)) this.pan(at - from - 0.1 * (to - from));
    const x = xOf(this.view, this.width, this.zoomed === null ? Math.max(at, this.view[0]) : at);
    this.head.style.transform = `translateX(${x}px)`;
    this.head.hidden = x < 0 || x > this.width;
    const received = this.get("mode") === "received";
    const text = `${clockText(clockS)} / ${clockText(received ? deck.plan.stopS : deck.durationS)}`;
    if (this.clock.value !== text) {
      this.clock.value = text;
      this.stage.setAttribute("aria-valuenow", deck.positionS.toFixed(2));
      this.stage.setAttribute("aria-valuemax", deck.durationS.toFixed(2));
      this.stage.setAttribute("aria-valuetext", `${deck.positionS.toFixed(1)} of ${deck.durationS.toFixed(1)} seconds`);
    }
  }

  say() {
    if (this.body.hidden) return;
    const region = this.get("region");
    let words = this.onWall && this.scene.timed ? "time since the request was sent, s" : "time in the speech, s";
    if (region.length) words = `selected ${region[0].toFixed(3)} to ${region[1].toFixed(3)} s · Esc clears`;
    if (this.hover !== null && this.hover >= 0) {
      words = readout(this.scene, this.hover, this.onWall ? positionOf(this.deck.plan.segments, this.hover) : null);
    }
    this.note.textContent = this.deck.trouble || words;
  }

  showPanels(mode) {
    const { deck } = this, set = (values) => this.set(values), chunk = this.chunk;
    this.list.hidden = mode === "abx";
    const rows = takeRows(deck, set, (index) => this.pick(index));
    this.list.style.gridTemplateColumns = `minmax(max-content, 1fr) repeat(${rows[0].childElementCount - 1}, auto)`;
    refill(this.list, ...rows);
    this.inspector.hidden = !chunk;
    if (chunk) refill(this.inspector, ...chunkFacts(deck, chunk));
    this.panel.hidden = this.onWall;
    this.gainRow.hidden = mode !== "difference" || !deck.difference.peak;
    this.gain.value = this.get("gain_db");
    this.gainText.value = `+${this.get("gain_db")} dB`;
    if (mode === "difference") refill(this.report, ...differenceFacts(deck));
    if (mode === "abx") {
      const state = { heard: this.get("heard"), score: this.get("score"), last: this.last };
      refill(this.report, ...trialControls(deck, state, set, (which) => this.answer(which)));
    }
  }

  /** The chunk that is inspected. */
  get chunk() {
    return this.onWall ? this.deck.plan.chunks.find(({ index }) => index === this.get("chunk")) : undefined;
  }

  answer(which) {
    const { x, answer } = this.deck.answer(which);
    this.last = `${x === answer ? "right" : "wrong"}: X was ${x.toUpperCase()}`;
    this.update();
  }
}

export default () => {
  let deck;
  const views = new Set();
  return {
    initialize({ model }) {
      deck = new Deck(model);
      deck.changed = () => views.forEach((view) => view.update());
      return () => deck.close();
    },
    render({ model, el }) {
      const own = { "data-lm-suppress-shortcuts": "true" }; // JupyterLab's keys, of which x cuts a cell
      const root = element("section", { class: "omni-player", "aria-label": "Audio player", ...own });
      el.append(root);
      const view = new Player(model, root, deck), look = () => view.update();
      views.add(view);
      const resized = new ResizeObserver(look), themed = new MutationObserver(look);
      resized.observe(root);
      themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "class"] });
      const scheme = matchMedia("(prefers-color-scheme: dark)");
      scheme.addEventListener("change", look);
      const follow = () => {
        if (!model.get("playing") || !views.has(view)) return;
        if (view.width) view.move();
        requestAnimationFrame(follow);
      };
      model.on("change:playing", follow);
      return () => {
        model.off("change:playing", follow);
        resized.disconnect();
        themed.disconnect();
        scheme.removeEventListener("change", look);
        views.delete(view);
      };
    },
  };
};
