"""Take the screenshot of the pages: `make screenshots`. It needs chromium (Debian: apt-get install chromium).

A project is baked in a temporary folder. Two runs train a small network on photos, decoded in each epoch by one worker
of a Dataset, and converted once. TensorBoard shows them. A busy machine spoils the curves.
"""

import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any, Self

from cookiecutter.main import cookiecutter
from facts import PROJECT, ROOT
from PIL import Image, ImageDraw

PICTURES = PROJECT / "docs" / "pictures"
PORT = 6016
DATASET = '''
"""Photos of a folder, opened and resized one by one."""

from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import Dataset


class Photos(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*/*.jpg"))
        self.class_names = sorted({path.parent.name for path in self.paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, row):
        image = Image.open(self.paths[row]).convert("RGB").resize((32, 32))
        pixels = np.array(image).transpose(2, 0, 1).copy()
        return {"images": pixels, "labels": self.class_names.index(self.paths[row].parent.name)}
'''


def draw_photos(folder: Path, number: int) -> None:
    """JPEG files of 500 x 375 pixels: circles and squares on noise."""
    random.seed(0)
    for shape in ("circle", "square"):
        (folder / shape).mkdir(parents=True)
        for each in range(number // 2):
            photo = Image.effect_noise((500, 375), 60).convert("RGB")
            x, y, r = random.randint(150, 350), random.randint(150, 220), random.randint(60, 120)
            draw = ImageDraw.Draw(photo)
            fill = draw.ellipse if shape == "circle" else draw.rectangle
            fill((x - r, y - r, x + r, y + r), tuple(random.randint(120, 255) for _ in range(3)))
            photo.save(folder / shape / f"{each:03d}.jpg", quality=90)


def make_runs(project: Path) -> None:
    """The runs `dataset` and `converted` of a project."""

    def run(*words: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if subprocess.run([sys.executable, *words], cwd=project, env=environment, check=False).returncode:
            raise SystemExit(f"error: {' '.join(words)} failed")

    draw_photos(project / "photos", 1200)
    (project / "mine.py").write_text(DATASET)
    run("convert.py", "images", "photos/", "data/photos.h5", "--size", "32")
    settings = ["data.val=10%", "data.batch_size=32", "data.pool_batches=4", "model.width=4"]
    settings += ["train.epochs=12", "log.every_steps=12"]
    dataset = ["data.dataset=mine:Photos", "data.train=photos", "loader.num_workers=1", "run.name=dataset"]
    run("train.py", *dataset, *settings)
    run("train.py", "data.train=data/photos.h5", "run.name=converted", *settings)


class Browser:
    """Chromium without a window. Commands are JSON that ends with a zero byte, on its file descriptors 3 and 4."""

    def __init__(self, folder: Path) -> None:
        command, self._write = os.pipe()
        self._read, answer = os.pipe()
        flags = f"--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={folder}"
        words = ["bash", "-c", f"exec chromium {flags} 3<&{command} 4>&{answer}"]
        self._process = subprocess.Popen(words, pass_fds=(command, answer), stderr=subprocess.DEVNULL)
        os.close(command)
        os.close(answer)
        self._received = b""
        self._number = 0
        self._session: dict[str, str] = {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers to a command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            *lines, rest = self._received.split(b"\0")
            for line in lines:
                answer = json.loads(line)
                if answer.get("id") == self._number:
                    self._received = rest
                    return answer["result"]
            self._received = rest + os.read(self._read, 1 << 20)

    def look_at(self, url: str, width: int, height: int, *, colours: str = "light") -> None:
        """Show a page in a window of this size in CSS pixels. colours: `light` or `dark`."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])
        self.ask("Emulation.setScrollbarsHidden", hidden=True)
        self.ask("Page.navigate", url=url)

    def picture(self, wait_s: float) -> Image.Image:
        """What the window shows after a while."""
        time.sleep(wait_s)
        return Image.open(BytesIO(base64.b64decode(self.ask("Page.captureScreenshot")["data"])))


def save(name: str, picture: Image.Image) -> None:
    """Write a picture with 64 colours: a quarter of the bytes."""
    path = PICTURES / f"{name}.png"
    picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def take_picture(project: Path, browser: Browser) -> None:
    """TensorBoard of the runs of a project."""
    command = [Path(sys.executable).with_name("tensorboard"), "--logdir", "runs", "--port", str(PORT)]
    with subprocess.Popen(command, cwd=project, stderr=subprocess.DEVNULL) as server:
        time.sleep(20)  # until it has read the runs
        query = "darkMode=false&smoothing=0&runFilter=dataset|converted&tagFilter=data/wait|cpu_user"
        browser.look_at(f"http://localhost:{PORT}/?{query}#timeseries", 1100, 560)
        time.sleep(15)
        buttons = "[...document.querySelectorAll('button')]"
        browser.ask("Runtime.evaluate", expression=f"{buttons}.find(b => b.textContent.includes('Settings')).click()")
        save("tensorboard", browser.picture(5))
        server.terminate()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        project = Path(cookiecutter(str(ROOT), no_input=True, output_dir=name))
        make_runs(project)
        with Browser(Path(name, "browser")) as browser:
            take_picture(project, browser)


if __name__ == "__main__":
    main()
