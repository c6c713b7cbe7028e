import { advance, pieces } from "./playout.js";

/** A change of track, a start and a stop take this long, so that none of them clicks. */
const FADE_S = 0.008;

/** Loops are handed to the audio thread this far ahead, more than a hidden page's timers are late. */
const AHEAD_S = 2.5;

/**
 * @typedef {{buffer: AudioBuffer, segments: import("./playout.js").Segment[], gain: number, stretched: number}} Track
 *   `stretched`: seconds of speech in a second of `buffer`
 * @typedef {{span: [number, number], speed: number, loop: boolean}} Manner what is played, and how; see `advance`
 */

/**
 * Samples as WebAudio wants them; it resamples on its own when they are played.
 * @param {{encoding: "int16"|"float32", sample_rate: number, data: DataView}} message little-endian, mono
 * @returns {AudioBuffer} of at least one sample, since there is no empty one
 */
export function audioBuffer({ encoding, sample_rate: sampleRate, data }) {
  const bytes = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
  const values = encoding === "int16" ? new Int16Array(bytes) : new Float32Array(bytes);
  const buffer = new AudioBuffer({ length: Math.max(1, values.length), numberOfChannels: 1, sampleRate });
  const samples = buffer.getChannelData(0);
  if (encoding === "int16") for (let i = 0; i < values.length; i++) samples[i] = values[i] / 32768;
  else samples.set(values);
  return buffer;
}

/** One track at a time through the loudspeaker. Its clock is the track's wall clock, of which `segments` speak. */
export class Sound {
  #context = null;
  #voice = null;

  /**
   * Plays `track` from `fromS`; what plays already fades out under it. Returns false if the browser refuses sound
   * until somebody clicks.
   * @param {Track} track
   * @param {number} fromS
   * @param {Manner} manner
   */
  async start(track, fromS, manner) {
    this.#context ??= new AudioContext({ latencyHint: "interactive" });
    if (this.#context.state !== "running") {
      await Promise.race([this.#context.resume(), new Promise((done) => setTimeout(done, 500))]);
      if (this.#context.state !== "running") return false;
    }
    this.#release();
    this.#begin(track, fromS, manner, this.#context.currentTime);
    return true;
  }

  /** Goes on with another track or manner where the clock stands, without a gap; `map` gives it another clock. */
  change(track, manner, map = (atS) => atS) {
    const { atS } = this.now();
    this.#release();
    this.#begin(track, map(atS), manner, this.#context.currentTime);
  }

  /** Fades out. Returns where the clock stood. */
  stop() {
    const at = this.now();
    this.#release();
    return at;
  }

  get isPlaying() {
    return this.#voice !== null;
  }

  /** Of the track that plays. */
  get segments() {
    return this.#voice.track.segments;
  }

  /** Where the clock stands, and whether it has come to its end. */
  now() {
    const { fromS, beganS, manner } = this.#voice;
    const elapsedS = Math.max(0, this.#context.currentTime - beganS);
    return advance(fromS, elapsedS, manner.speed, manner.span, manner.loop);
  }

  close() {
    this.#release();
    this.#context?.close();
    this.#context = null;
  }

  #begin(track, fromS, manner, beganS) {
    const gain = this.#context.createGain();
    gain.gain.setValueAtTime(0, beganS);
    gain.gain.linearRampToValueAtTime(track.gain, beganS + FADE_S);
    gain.connect(this.#context.destination);
    const voice = { track, fromS, manner, beganS, gain, sources: new Set(), nextFromS: fromS, nextS: beganS };
    this.#voice = voice;
    this.#feed(voice);
    if (manner.loop) voice.timer = setInterval(() => this.#feed(voice), (1000 * AHEAD_S) / 4);
  }

  /** Hands over one round after another until AHEAD_S are covered; a round that does not loop is the last. */
  #feed(voice) {
    const { track, manner } = voice;
    const [startS, stopS] = manner.span;
    while (voice.nextS < this.#context.currentTime + AHEAD_S) {
      for (const { delayS, offsetS, durationS } of pieces(track.segments, voice.nextFromS, stopS, manner.speed)) {
        const { buffer, stretched } = track, playbackRate = manner.speed / stretched;
        const source = new AudioBufferSourceNode(this.#context, { buffer, playbackRate });
        source.connect(voice.gain);
        source.start(voice.nextS + delayS, offsetS / stretched, durationS / stretched);
        source.onended = () => voice.sources.delete(source);
        voice.sources.add(source);
      }
      if (!manner.loop || stopS <= startS) break;
      voice.nextS += Math.max(0, stopS - voice.nextFromS) / manner.speed;
      voice.nextFromS = startS;
    }
  }

  #release() {
    if (this.#voice === null) return;
    const { gain, sources, timer } = this.#voice;
    const now = this.#context.currentTime;
    gain.gain.cancelScheduledValues(now);
    gain.gain.setValueAtTime(gain.gain.value, now);
    gain.gain.linearRampToValueAtTime(0, now + FADE_S);
    for (const source of sources) source.stop(now + FADE_S);
    clearInterval(timer);
    this.#voice = null;
  }
}
