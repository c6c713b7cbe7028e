/** What is done with samples before they are drawn or heard: outline, difference, another speed. Pure functions. */

/** Samples of one block of `peaks`. */
export const BLOCK = 256;

/**
 * Smallest and largest value of every block of samples; computed once, so that drawing stays cheap at any length.
 * @param {Float32Array} samples
 * @returns {{low: Float32Array, high: Float32Array}}
 */
export function peaks(samples) {
  const count = Math.ceil(samples.length / BLOCK);
  const low = new Float32Array(count), high = new Float32Array(count);
  for (let block = 0; block < count; block++) {
    let least = Infinity, most = -Infinity;
    for (let i = block * BLOCK; i < Math.min((block + 1) * BLOCK, samples.length); i++) {
      if (samples[i] < least) least = samples[i];
      if (samples[i] > most) most = samples[i];
    }
    low[block] = least;
    high[block] = most;
  }
  return { low, high };
}

/**
 * The outline of samples from..to in columns of equal width: lowest and highest value of each. Wide columns are taken
 * from the blocks they touch, so a peak may show up to a block early or late.
 * @param {Float32Array} samples
 * @param {{low: Float32Array, high: Float32Array}} blocks `peaks(samples)`
 * @returns {{low: Float32Array, high: Float32Array}}
 */
export function outline(samples, blocks, from, to, columns) {
  const low = new Float32Array(columns), high = new Float32Array(columns);
  const width = (to - from) / columns, coarse = width >= 2 * BLOCK;
  const [lows, highs, unit] = coarse ? [blocks.low, blocks.high, BLOCK] : [samples, samples, 1];
  for (let column = 0; column < columns; column++) {
    const first = Math.max(0, Math.floor((from + column * width) / unit));
    const last = Math.min(lows.length, Math.max(first + 1, Math.ceil((from + (column + 1) * width) / unit)));
    let least = Infinity, most = -Infinity;
    for (let i = first; i < last; i++) {
      if (lows[i] < least) least = lows[i];
      if (highs[i] > most) most = highs[i];
    }
    low[column] = first < last ? least : 0;
    high[column] = first < last ? most : 0;
  }
  return { low, high };
}

/**
 * B minus A, sample by sample; the shorter one counts as silent after its end.
 * @param {Float32Array} a
 * @param {Float32Array} b
 * @param {Float32Array} into of the longer one's length
 * @returns {{differing: number, peak: number, peakAt: number}} samples that differ, the largest difference and where
 */
export function difference(a, b, into) {
  let differing = Math.abs(a.length - b.length), peak = 0, peakAt = 0;
  for (let i = 0; i < Math.max(a.length, b.length); i++) {
    into[i] = (i < b.length ? b[i] : 0) - (i < a.length ? a[i] : 0);
    if (into[i] !== 0 && i < Math.min(a.length, b.length)) differing++;
    if (Math.abs(into[i]) > peak) {
      peak = Math.abs(into[i]);
      peakAt = i;
    }
  }
  return { differing, peak, peakAt };
}

/** A part of full scale in decibels. */
export function decibels(amplitude) {
  return 20 * Math.log10(amplitude);
}

/** The gain in whole dB, 0 to 90, that brings a peak to half of full scale. */
export function fittingGain(peak) {
  return peak > 0 ? Math.min(90, Math.max(0, Math.floor(decibels(0.5 / peak)))) : 0;
}

/**
 * The samples at another speed and the same pitch: WSOLA (Verhelst and Roelands, ICASSP 1993). Pieces are laid at their
 * new distance, 20 ms, and faded into each other; each is taken from where, within 8 ms of its place, it is most like
 * the true continuation of the one before.
 * @param {Float32Array} samples
 * @param {number} sampleRate
 * @param {number} speed
 * @returns {Float32Array} of samples.length / speed, rounded
 */
export function stretch(samples, sampleRate, speed) {
  const made = new Float32Array(Math.round(samples.length / speed));
  const hop = Math.round(0.02 * sampleRate), reach = Math.round(0.008 * sampleRate);
  let next = 0;
  for (let at = 0; at < made.length; at += hop) {
    const place = Math.round(at * speed);
    let start = mostAlike(samples, next, hop, place - reach, place + reach, 4);
    start = mostAlike(samples, next, hop, start - 3, start + 3, 1);
    for (let i = 0; i < Math.min(hop, made.length - at); i++) {
      const fade = i / hop;
      made[at + i] = (1 - fade) * (samples[next + i] ?? 0) + fade * (samples[start + i] ?? 0);
    }
    next = start + hop;
  }
  return made;
}

/** Where in from..to `length` samples are most like those at `target`, by normalised correlation of every fourth. */
function mostAlike(samples, target, length, from, to, step) {
  let best = Math.max(0, from), most = -Infinity;
  for (let start = best; start <= to; start += step) {
    let product = 0, energy = 1e-9;
    const stop = Math.min(length, samples.length - start, samples.length - target);
    for (let i = 0; i < stop; i += 4) {
      product += samples[target + i] * samples[start + i];
      energy += samples[start + i] ** 2;
    }
    const alike = product / Math.sqrt(energy);
    if (alike > most) {
      most = alike;
      best = start;
    }
  }
  return best;
}
