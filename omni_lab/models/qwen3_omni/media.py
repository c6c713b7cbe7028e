"""Recordings, pictures and clips to the inputs of the audio and vision towers.

What a part may hold:
- audio: a path, bytes or data URL of a wav, flac, mp3 or ogg file (any rate, mono or stereo), or an array [samples]
  or [samples, channels] with its `rate` in Hz (float in [-1, 1] or integers of full scale).
- image: a path, bytes or data URL of any format that Pillow reads, a Pillow image, or a uint8 array [height, width, 3].
- video: a list of images with its `fps` (default 2), or a path, bytes or data URL of an animated GIF, WebP or PNG,
  of which `fps` frames a second are taken (default 2). There is no sound in it.

Nothing is fetched over a network. The numbers equal those of transformers' WhisperFeatureExtractor and
Qwen2VLImageProcessor (Pillow version) on the same samples and pixels.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence

from omni_lab.core import RequestError
from omni_lab.models.qwen3_omni.messages import MediaPart, decode_base64

SAMPLE_RATE = 16_000
WINDOW = 400
"""Samples of one spectrogram window, 25 ms; also the shortest recording that is accepted."""
HOP = 160
DEFAULT_FPS = 2.0
MAX_FRAMES = 768
VIDEO_PIXELS = (128 * 32 * 32, 768 * 32 * 32)
"""Smallest and largest number of pixels of a frame (Qwen3OmniMoeProcessor of transformers)."""
MAX_ASPECT_RATIO = 200
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What Pillow raises on a file that is missing, broken, or too large to be a picture."""


def because(error: Exception) -> str:
    """The end of an error's sentence about a medium; bytes have no name that would say anything."""
    return "" if "BytesIO" in str(error) else f": {error}"


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of one size, `fps` of them a second."""

    frames: list[Image.Image]
    fps: float


LOUDEST = 1e3
"""Of audio samples; far above full scale the spectrum's power leaves the range of float32."""
RATES = (1000, 768_000)
FPS = (0.001, 1000)


def open_source(source: Any, field: str) -> Path | io.BytesIO:
    """A file to read: a local path, or the content of bytes and data URLs. Raises RequestError for anything else."""
    if isinstance(source, bytes | bytearray):
        return io.BytesIO(source)
    if isinstance(source, Path):
        return source
    if not isinstance(source, str):
        raise RequestError(f"expected a path, bytes, a data URL or an array, got {type(source).__name__}", field)
    if source.startswith("data:"):
        header, comma, content = source.partition(",")
        if not comma or not header.endswith(";base64"):
            raise RequestError("expected a data URL of the form data:<type>;base64,<content>", field)
        return io.BytesIO(decode_base64(content, field))
    if "://" in source and not source.startswith("file://"):
        raise RequestError("remote addresses are not fetched; send a data URL or the path of a local file", field)
    return Path(source.removeprefix("file://"))


def load_audio(part: MediaPart, max_seconds: float) -> np.ndarray:
    """One channel at 16 kHz, float32 [samples]: the mean of the channels, resampled with soxr."""
    if isinstance(part.source, np.ndarray):
        samples, rate = _audio_array(part)
    else:
        samples, rate = _audio_file(part, max_seconds)
    if len(samples) > max_seconds * rate:
        raise RequestError(f"is {len(samples) / rate:.1f} s long; the limit is {max_seconds:.0f} s", part.field)
    if not (np.abs(samples) <= LOUDEST).all():
        raise RequestError(f"contains values that are not finite, or above {LOUDEST:g}; full scale is 1", part.field)
    if rate != SAMPLE_RATE:
        import soxr

        samples = soxr.resample(samples, rate, SAMPLE_RATE)
    if len(samples) < WINDOW:
        raise RequestError(f"is {len(samples) / SAMPLE_RATE:.3f} s long; at least 0.025 s are needed", part.field)
    return samples


def _audio_array(part: MediaPart) -> tuple[np.ndarray, float]:
    rate = part.options.get("rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not RATES[0] <= rate <= RATES[1]:
        raise RequestError(f"an array needs its 'rate' in Hz, from {RATES[0]} to {RATES[1]}, got {rate!r}", part.field)
    samples = part.source
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fi":
        raise RequestError(
            f"expected numbers [samples] or [samples, channels], got {samples.dtype} {list(samples.shape)}", part.field
        )
    if samples.dtype.kind == "i":
        samples = samples / -float(np.iinfo(samples.dtype).min)
    samples = samples.astype(np.float32)
    return samples if samples.ndim == 1 else samples.mean(axis=1), rate


def _audio_file(part: MediaPart, max_seconds: float) -> tuple[np.ndarray, float]:
    import soundfile

    source = open_source(part.source, part.field)
    try:
        with soundfile.SoundFile(source) as file:
            samples = file.read(int(max_seconds * file.samplerate) + 1, dtype="float32", always_2d=True)
            return samples.mean(axis=1), file.samplerate
    except (OSError, ValueError, soundfile.SoundFileError) as error:
        raise RequestError(f"cannot be read as audio{because(error)}", part.field) from None


def mel_frames(recordings: list[np.ndarray]) -> list[int]:
    """Spectrogram frames of each recording, 100 a second.

    Recordings of one request are padded to the longest, where a frame that has begun counts; the last one of the
    longest counts only if it is complete (the attention mask of WhisperFeatureExtractor).
    """
    longest = max(map(len, recordings)) // HOP
    return [min(math.ceil(len(samples) / HOP), longest) for samples in recordings]


def log_mel(recordings: list[np.ndarray], bins: int) -> torch.Tensor:
    """Whisper's log-mel spectrograms side by side, float32 [bins, sum of mel_frames]."""
    padded = np.zeros((len(recordings), max(map(len, recordings))), dtype=np.float32)
    for row, samples in zip(padded, recordings, strict=True):
        row[: len(samples)] = samples
    spectrum = torch.stft(torch.from_numpy(padded), WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
    power = (spectrum[..., :-1].abs() ** 2).contiguous()
    log = (mel_filters(bins).T @ power).clamp(min=1e-10).log10()
    log = torch.maximum(log, log.amax(dim=(1, 2), keepdim=True) - 8.0)
    features = (log + 4.0) / 4.0
    return torch.cat([row[:, :frames] for row, frames in zip(features, mel_frames(recordings), strict=True)], dim=1)


def mel_filters(bins: int) -> torch.Tensor:
    """Triangular filters [201, bins] on Slaney's mel scale up to 8 kHz, each of area 1 (Auditory Toolbox, 1998).

    The scale is linear up to 1 kHz (15 mel), then logarithmic: a factor of 6.4 is 27 mel.
    """
    mels = np.linspace(0.0, 15 + 27 * math.log(8.0) / math.log(6.4), bins + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * math.log(6.4) / 27))
    frequencies = np.linspace(0, SAMPLE_RATE // 2, WINDOW // 2 + 1)[:, None]
    widths = np.diff(edges)
    rising = (frequencies - edges[:-2]) / widths[:-1]
    falling = (edges[2:] - frequencies) / widths[1:]
    filters = np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])
    return torch.from_numpy(filters).float()


def load_image(part: MediaPart) -> Image.Image:
    """An RGB picture, upright, transparent parts on white."""
    return _image(part.source, part.field)


def load_video(part: MediaPart) -> Video:
    """Frames of one size; of an animation those that show at the times 0, 1/fps, 2/fps, ..."""
    fps = part.options.get("fps", DEFAULT_FPS)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not FPS[0] <= fps <= FPS[1]:
        raise RequestError(f"fps must be a number from {FPS[0]} to {FPS[1]}, got {fps!r}", part.field)
    if isinstance(part.source, list | tuple):
        sources = part.source[: MAX_FRAMES + 1]
        frames = [_image(frame, f"{part.field}[{index}]") for index, frame in enumerate(sources)]
    else:
        frames = _animation(part, fps)
    if not frames or len(frames) > MAX_FRAMES:
        count = f"more than {MAX_FRAMES}" if frames else "no"
        raise RequestError(f"has {count} frames at {fps} a second; take 1 to {MAX_FRAMES}", part.field)
    if len({frame.size for frame in frames}) > 1:
        raise RequestError("its frames differ in size", part.field)
    return Video(frames, float(fps))


def _image(source: Any, field: str) -> Image.Image:
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            shape = f"{source.dtype} {list(source.shape)}"
            raise RequestError(f"expected a uint8 array [height, width, 3], got {shape}", field)
        return Image.fromarray(source)
    if not isinstance(source, Image.Image):
        source = open_source(source, field)
    try:
        return _rgb(source if isinstance(source, Image.Image) else ImageOps.exif_transpose(Image.open(source)))
    except UNREADABLE as error:
        raise RequestError(f"cannot be read as an image{because(error)}", field) from None


def _rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _animation(part: MediaPart, fps: float) -> list[Image.Image]:
    source = open_source(part.source, part.field)
    try:
        with Image.open(source) as file:
            frames: list[Image.Image] = []
            end = 0.0
            for frame in ImageSequence.Iterator(file):
                frame.load()  # the duration is known only then
                end += (frame.info.get("duration") or 100) / 1000  # players show a frame without duration for 100 ms
                shown = math.ceil(min(end * fps, MAX_FRAMES + 1)) - len(frames)
                if shown > 0:
                    frames += [_rgb(frame)] * shown
            return frames
    except UNREADABLE as error:
        raise RequestError(f"cannot be read as an animation (GIF, WebP or PNG){because(error)}", part.field) from None


@dataclass(frozen=True, slots=True)
class Patches:
    """How pictures are cut for the vision tower: `patch` pixels square, merged `merge` x `merge` to one token."""

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def image_grid(self, image: Image.Image, field: str) -> tuple[int, int, int]:
        """Patches of a picture: 1, rows, columns."""
        return 1, *self._rows_columns(image.size, self.min_pixels, self.max_pixels, field)

    def video_grid(self, video: Video, field: str) -> tuple[int, int, int]:
        """Patches of a clip: time steps of `temporal` frames, rows, columns."""
        steps = math.ceil(len(video.frames) / self.temporal)
        return steps, *self._rows_columns(video.frames[0].size, *VIDEO_PIXELS, field)

    def _rows_columns(self, size: tuple[int, int], least: int, most: int, field: str) -> tuple[int, int]:
        """Rows and columns after resizing to whole tokens within the pixel limits, the aspect ratio nearly kept."""
        width, height = size
        if max(size) > MAX_ASPECT_RATIO * min(size):
            raise RequestError(f"{width}x{height} is too long; sides may differ by {MAX_ASPECT_RATIO} times", field)
        unit = self.patch * self.merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < least:
            grow = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * self.merge, columns * self.merge

    def cut(self, frames: list[Image.Image], grid: tuple[int, int, int]) -> torch.Tensor:
        """Pixels as the patch embedding reads them: float32 [patches, 3 * temporal * patch * patch].

        Patches are ordered by time, then by token, then by place within the token. A picture, and a last frame
        without a partner, is repeated to fill its time step.
        """
        steps, rows, columns = grid
        size = columns * self.patch, rows * self.patch
        pixels = np.stack([np.asarray(frame.resize(size, Image.Resampling.BICUBIC)) for frame in frames])
        values = ((pixels * (1 / 255)).astype(np.float32) - np.float32(self.mean)) / np.float32(self.std)
        missing = steps * self.temporal - len(frames)
        values = np.concatenate([values, np.repeat(values[-1:], missing, axis=0)])
        split = values.reshape(
            steps,
            self.temporal,
            rows // self.merge,
            self.merge,
            self.patch,
            columns // self.merge,
            self.merge,
            self.patch,
            3,
        )
        ordered = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return torch.from_numpy(ordered.reshape(steps * rows * columns, -1))
