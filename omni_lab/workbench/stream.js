import { positionOf, receive, schedule } from "./playout.js";

/** Chunks start this much later than they could, so that the block of audio they begin in is not past already. */
const LEAD_S = 0.02;

/** What is silenced fades out in this time, so that it does not click. */
const HUSH_S = 0.01;

/** One answer at a time, heard while it arrives: chunks back to back, and after a silence the one that came late. */
export class Stream {
  #context = null;
  #gain = null;
  #listener = null;
  #arrivalsMs = [];
  #chunkSamples = [];

  /** Makes ready for an answer, and ends the one before. Call it early: a browser takes a while to open the device. */
  begin(sampleRate) {
    this.silence();
    if (this.#context?.sampleRate !== sampleRate) {
      this.close();
      this.#context = new AudioContext({ sampleRate }); // resampling chunk by chunk would be heard at every seam
    }
    this.#context.resume(); // stays suspended until somebody clicks, if nobody has
    [this.#listener, this.#arrivalsMs, this.#chunkSamples] = [null, [], []];
    this.#gain = new GainNode(this.#context);
    this.#gain.connect(this.#context.destination);
  }

  /** Plays a chunk after those before it. @param {Float32Array} samples mono, full scale 1 */
  push(samples) {
    if (!samples.length) return;
    const { currentTime, sampleRate } = this.#context;
    const buffer = new AudioBuffer({ length: samples.length, sampleRate });
    buffer.copyToChannel(samples, 0);
    this.#arrivalsMs.push(1000 * currentTime);
    this.#chunkSamples.push(samples.length);
    this.#listener = receive(this.#listener, 1000 * currentTime, buffer.duration);
    const source = new AudioBufferSourceNode(this.#context, { buffer });
    source.connect(this.#gain);
    source.start(this.#listener.playMs / 1000 + LEAD_S);
  }

  /** Ends the answer that is heard. */
  silence() {
    this.#listener = null;
    const gain = this.#gain;
    if (gain === null) return;
    this.#gain = null;
    gain.gain.setTargetAtTime(0, this.#context.currentTime, HUSH_S / 3);
    setTimeout(() => gain.disconnect(), 2000 * HUSH_S);
  }

  close() {
    this.#context?.close();
    [this.#context, this.#gain, this.#listener] = [null, null, null];
  }

  get isPlaying() {
    if (this.#listener === null) return false;
    return this.#context.currentTime < this.#listener.nowMs / 1000 + this.#listener.levelS + LEAD_S;
  }

  /** Seconds of the answer that have been heard. */
  get positionS() {
    return positionOf(this.#heard().segments, this.#context.currentTime - LEAD_S);
  }

  /** What somebody has to know who listens here, in words; "" if there is nothing. */
  get trouble() {
    if (this.#listener !== null && this.#context.state !== "running") {
      return "the browser keeps the sound back until you click";
    }
    const silentMs = this.#heard().underruns.reduce((sum, { startMs, stopMs }) => sum + stopMs - startMs, 0);
    return silentMs < 20 ? "" : `${(silentMs / 1000).toFixed(2)} s of silence were heard here`;
  }

  #heard() {
    return schedule(this.#arrivalsMs, this.#chunkSamples, this.#context?.sampleRate ?? 1);
  }
}
