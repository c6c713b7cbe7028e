import { gapless, positionOf, schedule, wallOf } from "./playout.js";
import { difference, fittingGain, peaks, stretch } from "./signal.js";
import { audioBuffer, Sound } from "./sound.js";

/** How often, in ms, the model hears where the playhead is. */
const REPORT_MS = 100;

/**
 * What is heard and where, following the widget's traitlets; one for a model, whatever the number of its views.
 *
 * In mode `received` the clock is the wall clock of the take that is heard, with its silences; otherwise it is the
 * position in the speech. Another take goes on where the clock stands: at the same position, or at the same moment
 * after the request.
 */
export class Deck {
  #model;
  #sound = new Sound();
  #clockS = 0;
  #told = 0;
  #timer = null;
  #known = null;
  #x = coin();
  /** Tells the views that something but the playhead changed. */
  changed = () => {};
  /** Positions of the one chunk that is heard alone, null otherwise. */
  solo = null;
  /** Why nothing is heard, in words. */
  trouble = "";

  constructor(model) {
    this.#model = model;
    this.#load();
    model.on("change:takes", () => this.#load());
    for (const name of ["a", "b"]) model.on(`change:${name}`, () => this.#fitGain());
    for (const name of ["current", "a", "b", "heard", "speed", "loop", "region", "gain_db"]) {
      model.on(`change:${name}`, () => this.#retune());
    }
    model.on("change:mode", () => this.#changeMode());
    model.on("change:playing", () => (model.get("playing") ? this.#play() : this.#pause()));
    model.on("change:position_s", () => model.get("position_s") !== this.#told && this.seek(model.get("position_s")));
    for (const name of ["chunk", "trials", "score"]) model.on(`change:${name}`, () => this.changed());
  }

  get takes() {
    return this.#model.get("takes");
  }

  /** What was made of the takes: when they are others, it is made anew by whoever asks first. */
  get #own() {
    const { takes } = this;
    if (this.#known?.takes !== takes) {
      const plans = takes.map((take) => schedule(take.arrivals_ms, take.chunk_samples, take.sample_rate));
      this.#known = { takes, plans, loaded: [], difference: null };
    }
    return this.#known;
  }

  /** Chunks, silences and buffer of every take. */
  get plans() {
    return this.#own.plans;
  }

  get mode() {
    return this.#model.get("mode");
  }

  /** Whether the listener's waits matter: not to a comparison. */
  get onWall() {
    return this.mode === "speech" || this.mode === "received";
  }

  /** Index of the take that is heard; in a blind test that is not for showing. */
  get index() {
    if (this.mode !== "abx") return this.at("current");
    const heard = this.#model.get("heard");
    return this.at(heard === "x" ? this.#x : heard);
  }

  /** The index that trait `current`, `a` or `b` names, also while other takes and their index arrive one by one. */
  at(name) {
    return Math.min(this.#model.get(name), this.takes.length - 1);
  }

  /** Chunks, silences and buffer of the take that is heard. */
  get plan() {
    return this.plans[this.index];
  }

  /** Samples of the take that is heard, or of the difference: decoded once, when they are first wanted. */
  get material() {
    return this.mode === "difference" ? this.difference : this.#decode(this.index);
  }

  /** B minus A with what is known of it; `trouble` where there is none. */
  get difference() {
    const [a, b] = [this.at("a"), this.at("b")];
    const own = this.#own;
    if (own.difference?.a !== a || own.difference?.b !== b) own.difference = { a, b, ...this.#subtract(a, b) };
    return own.difference;
  }

  get segments() {
    return this.mode === "received" ? this.plan.segments : gapless(this.durationS);
  }

  /** Length of the speech that is played; in a blind test the shorter one's, which tells nothing. */
  get durationS() {
    if (this.mode === "difference") return this.difference.durationS;
    if (this.mode !== "abx") return this.plan.durationS;
    return Math.min(...["a", "b"].map((which) => this.plans[this.at(which)].durationS));
  }

  get clockS() {
    return this.#sound.isPlaying ? this.#sound.now().atS : this.#clockS;
  }

  get positionS() {
    return positionOf(this.segments, this.clockS);
  }

  /** The span of the clock that is played: a chunk alone, the region, or all. */
  get span() {
    const region = this.#model.get("region");
    const chosen = this.solo ?? (region.length ? region : null);
    if (chosen === null) return [0, this.mode === "received" ? this.plan.stopS : this.durationS];
    return chosen.map((positionS) => (this.mode === "received" ? wallOf(this.segments, positionS) : positionS));
  }

  /** Goes to a position in the speech. */
  seek(positionS) {
    if (!this.takes.length) return;
    const inside = Math.min(Math.max(0, positionS), this.durationS);
    this.seekClock(this.mode === "received" ? wallOf(this.segments, inside) : inside);
  }

  /** Goes to a moment of the clock, which in mode `received` may lie in a silence. */
  seekClock(clockS) {
    this.solo = null;
    this.#clockS = Math.min(Math.max(0, clockS), this.span[1]);
    if (this.#sound.isPlaying) this.#sound.change(this.#track, this.#manner, () => this.#clockS);
    this.#report();
    this.changed();
  }

  /** Plays one chunk alone and shows it. */
  async hear(chunk) {
    this.#model.set("chunk", chunk.index);
    if (!this.onWall) this.#model.set("mode", "speech");
    this.solo = [chunk.startS, chunk.stopS];
    this.#clockS = this.span[0];
    if (this.#model.get("playing")) this.#sound.change(this.#track, this.#manner, () => this.#clockS);
    else this.#model.set("playing", true);
    this.#model.save_changes();
    this.changed();
  }

  /** Takes down which take the listener believes X to be, draws another X, and returns the trial. */
  answer(answer) {
    const trial = { a: this.#model.get("a"), b: this.#model.get("b"), x: this.#x, answer };
    this.#model.set("trials", [...this.#model.get("trials"), trial]);
    this.#x = coin();
    if (this.#model.get("heard") === "x") this.#retune();
    this.#model.save_changes();
    return trial;
  }

  close() {
    clearInterval(this.#timer);
    this.#sound.close();
    this.#model.off();
  }

  /** Speech keeps its pitch at any speed. In comparisons it follows: nothing is added that the samples do not hold. */
  get #track() {
    const gain = this.mode === "difference" ? 10 ** (this.#model.get("gain_db") / 20) : 1;
    const speed = this.onWall ? this.#model.get("speed") : 1;
    return { buffer: this.#atSpeed(this.material, speed), stretched: speed, segments: this.segments, gain };
  }

  get #manner() {
    const loop = this.#model.get("loop") && this.solo === null;
    return { span: this.span, speed: this.#model.get("speed"), loop };
  }

  #load() {
    if (this.#sound.isPlaying) this.#sound.stop();
    this.#clockS = 0;
    this.#halt();
    const positionS = this.#model.get("position_s");
    if (positionS > 0) this.seek(positionS);
    else this.changed();
  }

  #decode(index) {
    const { loaded } = this.#own;
    if (!loaded[index]) {
      const buffer = audioBuffer(this.takes[index]);
      const samples = buffer.getChannelData(0);
      loaded[index] = { buffer, samples, blocks: peaks(samples), sampleRate: buffer.sampleRate };
    }
    return loaded[index];
  }

  #atSpeed(material, speed) {
    const { buffer, samples, sampleRate } = material;
    if (speed === 1 || !samples.length) return buffer;
    if (material.stretched?.speed !== speed) {
      const made = stretch(samples, sampleRate, speed);
      const slowed = new AudioBuffer({ length: Math.max(1, made.length), numberOfChannels: 1, sampleRate });
      slowed.copyToChannel(made, 0);
      material.stretched = { speed, buffer: slowed };
    }
    return material.stretched.buffer;
  }

  #subtract(a, b) {
    const [first, second] = [this.#decode(a), this.#decode(b)];
    const { sampleRate } = first;
    const sameRate = sampleRate === second.sampleRate;
    const length = Math.max(first.samples.length, second.samples.length);
    const buffer = new AudioBuffer({ length, numberOfChannels: 1, sampleRate });
    const samples = buffer.getChannelData(0);
    const unknown = { differing: length, peak: 0, peakAt: 0 };
    const found = sameRate ? difference(first.samples, second.samples, samples) : unknown;
    const durationS = Math.max(this.plans[a].durationS, this.plans[b].durationS);
    const rates = `no difference signal: sample rates are ${sampleRate} and ${second.sampleRate} Hz`;
    return { buffer, samples, blocks: peaks(samples), sampleRate, durationS, trouble: sameRate ? "" : rates, ...found };
  }

  async #play() {
    // later, since the model does not tell Python of what is changed back within a change
    if (!this.takes.length || !(this.durationS > 0)) return queueMicrotask(() => this.#halt());
    const [startS, stopS] = this.span;
    if (this.#clockS < startS || this.#clockS >= stopS - 1e-3) this.#clockS = startS;
    const started = await this.#sound.start(this.#track, this.#clockS, this.#manner);
    this.trouble = started ? "" : "The browser plays sound only after a click in the page: press play.";
    if (!started) return this.#halt();
    if (!this.#model.get("playing")) return this.#pause();
    clearInterval(this.#timer);
    this.#timer = setInterval(() => this.#tick(), REPORT_MS / 2);
    this.changed();
  }

  #pause() {
    if (this.#sound.isPlaying) this.#clockS = this.#sound.stop().atS;
    this.solo = null;
    clearInterval(this.#timer);
    this.#report();
    this.changed();
  }

  /** Stops, and says so to Python. */
  #halt() {
    this.#model.set("playing", false);
    this.#pause();
    this.#model.save_changes();
  }

  #tick() {
    if (!this.#sound.isPlaying) return;
    const { atS, ended } = this.#sound.now();
    if (ended) {
      const back = this.solo === null ? null : this.span[0];
      this.#halt();
      if (back !== null) this.seekClock(back);
    } else if (Math.abs(positionOf(this.segments, atS) - this.#told) >= REPORT_MS / 1000) this.#report();
  }

  #report() {
    if (!this.takes.length) return;
    this.#told = this.positionS;
    this.#model.set("position_s", this.#told);
    this.#model.save_changes();
  }

  /** Makes the difference between A and B loud enough to hear, when it is first listened to. */
  #fitGain() {
    if (this.mode !== "difference") return;
    this.#model.set("gain_db", fittingGain(this.difference.peak));
    this.#model.save_changes();
  }

  /** Takes up a change of take, speed or region at the moment that the clock shows. */
  #retune() {
    if (this.#sound.isPlaying) {
      const [startS, stopS] = this.span;
      this.#sound.change(this.#track, this.#manner, (atS) => (startS <= atS && atS < stopS ? atS : startS));
    } else if (this.takes.length) {
      this.#clockS = Math.min(this.#clockS, this.span[1]);
      this.#report();
    }
    this.changed();
  }

  #changeMode() {
    if (!this.takes.length) return;
    const heardS = this.#sound.isPlaying ? positionOf(this.#sound.segments, this.#sound.now().atS) : this.#told;
    const positionS = Math.min(heardS, this.durationS);
    this.solo = null;
    this.#fitGain();
    this.#clockS = this.mode === "received" && positionS > 0 ? wallOf(this.segments, positionS) : positionS;
    if (this.#sound.isPlaying) this.#sound.change(this.#track, this.#manner, () => this.#clockS);
    this.changed();
  }
}

/** "a" or "b", by the browser's cryptographic random numbers. */
function coin() {
  return crypto.getRandomValues(new Uint8Array(1))[0] & 1 ? "a" : "b";
}
