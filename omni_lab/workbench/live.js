import { Arrivals, nothing } from "./arrivals.js";
import { Stream } from "./stream.js";

/*
 * The kernel sends traits, which every view shows whenever it was opened, and messages with sound, which is played once
 * for all views: {begin: n} when an answer starts, {chunk: n} with its samples, {silence: true} when it is to be quiet.
 */
export default () => {
  const stream = new Stream();
  const heads = new Set(); // what each view does while something is heard
  let current = null; // the answer that may be heard

  function hush() {
    current = null;
    stream.silence();
  }

  function heard(model, { begin, chunk, silence }, [samples] = []) {
    if (begin !== undefined) {
      current = begin;
      stream.begin(model.get("sample_rate"));
    } else if (silence) {
      hush();
    } else if (chunk === current) {
      const { buffer, byteOffset, byteLength } = samples;
      const started = stream.isPlaying;
      stream.push(new Float32Array(buffer.slice(byteOffset, byteOffset + byteLength)));
      if (!started) requestAnimationFrame(follow);
    }
  }

  function follow() {
    for (const show of heads) show();
    if (stream.isPlaying) requestAnimationFrame(follow);
  }

  function initialize({ model }) {
    model.on("msg:custom", (message, buffers) => heard(model, message, buffers));
    return () => stream.close();
  }

  function render({ model, el }) {
    el.classList.add("omni-live");
    el.setAttribute("role", "region");
    el.ariaLabel = "Live player";
    el.innerHTML = `
      <label>Text to say <textarea rows="2" placeholder="Enter speaks it"></textarea></label>
      <div class="bar">
        <button class="speak">Speak</button><button class="stop">Stop</button>
        <label class="speaker">voice <select></select></label><span class="status" role="status"></span>
      </div>
      <p class="error" role="alert"></p><p class="answer" aria-live="polite"></p><div class="picture"></div>`;
    const [box, speak, stop, voice, status, error, answer] = [
      "textarea", ".speak", ".stop", ".speaker", ".status", ".error", ".answer",
    ].map((name) => el.querySelector(name));
    const voices = voice.querySelector("select");
    const picture = new Arrivals(el.querySelector(".picture"));
    let trouble = "";

    function say() {
      hush();
      stream.begin(model.get("sample_rate")); // here somebody has clicked, so the browser allows it
      model.send({ say: box.value, speaker: voices.value || null });
    }

    function quiet() {
      hush();
      follow();
      model.send({ stop: true });
    }

    function showState() {
      const state = model.get("state");
      const over = state === "failed" || state === "closed";
      speak.disabled = box.disabled = over;
      stop.disabled = over || (state === "ready" && !stream.isPlaying);
      status.textContent = [model.get("status"), stream.trouble].filter(Boolean).join(" · ");
      error.textContent = model.get("error");
      answer.textContent = model.get("answer");
    }

    function showVoices() {
      const names = model.get("speakers");
      voices.replaceChildren(new Option("default", ""), ...names.map((name) => new Option(name)));
      voice.hidden = names.length < 2;
    }

    const showPrompt = () => { box.value = model.get("prompt"); };
    const showRecord = () => picture.show(model.get("record") ?? nothing(model.get("sample_rate")));

    function showHead() {
      const playing = stream.isPlaying;
      picture.playhead(playing ? stream.positionS : null);
      if (!playing || stop.disabled || trouble !== stream.trouble) showState();
      trouble = stream.trouble;
    }

    speak.onclick = say;
    stop.onclick = quiet;
    box.onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      say();
    };
    const changes = { prompt: showPrompt, record: showRecord, speakers: showVoices };
    for (const name of ["state", "status", "error", "answer"]) changes[name] = showState;
    for (const [name, show] of Object.entries(changes)) {
      model.on(`change:${name}`, show);
      show();
    }
    heads.add(showHead);
    return () => {
      heads.delete(showHead);
      picture.close();
    };
  }

  return { initialize, render };
};
