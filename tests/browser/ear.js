// Beside the loudspeaker of a page hangs an ear: `loudness()` is what is heard now; `contexts` are its clocks.
const Real = AudioContext, connect = AudioNode.prototype.connect, ears = [];
window.contexts = [];
window.AudioContext = class extends Real {
  constructor(options) {
    super(options);
    contexts.push(this);
  }
};
AudioNode.prototype.connect = function (target, ...rest) {
  if (target instanceof AudioDestinationNode) {
    const ear = new AnalyserNode(this.context, { fftSize: 2048 });
    connect.call(this, ear);
    ears.push(ear);
  }
  return connect.call(this, target, ...rest);
};
window.loudness = () => {
  const samples = new Float32Array(2048);
  ears.at(-1)?.getFloatTimeDomainData(samples);
  return Math.max(...samples.map(Math.abs));
};
