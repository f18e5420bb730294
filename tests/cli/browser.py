"""A headless Chromium, driven over its DevTools pipe by JSON messages that end in a zero byte.

Time and frames are real: layout and scrolling happen as they do for a reader.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time


def find_browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


class Browser:
    """A browser with one open page; a context manager. `problems` and `requests` belong to the page shown last."""

    def __init__(self, program, timeout=60):
        self.timeout = timeout
        self.number = 0
        self.buffer = b""
        self.problems, self.requests = [], []
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        target = self._open_page(program)
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _open_page(self, program):
        """Starts the browser, which on a busy machine may exit before it answers anything: up to three times."""
        for attempt in range(3):
            self.process, self.write_end, self.read_end = self._start(program)
            try:
                return self.call("Target.createTarget", url="about:blank")["targetId"]
            except (RuntimeError, BrokenPipeError):
                self._stop()
                if attempt == 2:
                    raise

    def _start(self, program):
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4. The shell moves the pipes there: they may have
        # any numbers, including these two.
        # fmt: off
        command = [
            "sh", "-c", f'exec 8<&{command_read} 9>&{answer_write}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"', "sh",
            program, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--no-first-run", "--disable-sync", "--disable-background-networking", "--disable-component-update",
            "--disable-dev-shm-usage", "--force-color-profile=srgb", f"--user-data-dir={self.profile.name}", "about:blank",
        ]
        # fmt: on
        with self._log("wb") as log:
            process = subprocess.Popen(
                command,
                pass_fds=(command_read, answer_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        os.close(command_read)
        os.close(answer_write)
        return process, command_write, answer_read

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except Exception:
            pass
        self._stop()
        self.profile.cleanup()

    def _stop(self):
        self.process.kill()
        self.process.wait()
        os.close(self.write_end)
        os.close(self.read_end)

    def _log(self, mode):
        return open(os.path.join(self.profile.name, "stderr"), mode)

    def _receive(self, deadline):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser did not answer within {self.timeout} s")
            piece = os.read(self.read_end, 1 << 16)
            if not piece:
                status = self.process.wait(10)
                with self._log("rb") as log:
                    raise RuntimeError(f"the browser exited with status {status}: {log.read()[-2000:].decode(errors='replace')}")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        kind, facts = event["method"], event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif kind == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {[argument.get('value') for argument in facts['args']]}")
        elif kind == "Log.entryAdded":
            self.problems.append(facts["entry"]["text"])
        elif kind == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {facts['message']}")
            self.number += 1
            message = {"id": self.number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            self._send({**message, "sessionId": self.session})
        elif kind == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])

    def _send(self, message):
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write_end, data) :]

    def call(self, method, **parameters):
        self.number += 1
        number = self.number
        message = {"id": number, "method": method, "params": parameters}
        if hasattr(self, "session") and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        self._send(message)
        deadline = time.monotonic() + self.timeout
        while True:
            answer = self._receive(deadline)
            if "method" in answer:
                self._note(answer)
            elif answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def show(self, path, width, height, dark=False):
        """Opens a file in a window of this size, and waits until it is loaded and painted."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.problems, self.requests = [], []
        self.call("Page.navigate", url=f"file://{path}")
        deadline = time.monotonic() + self.timeout
        while not self._has_loaded(f"file://{path}"):
            assert time.monotonic() < deadline, f"{path} was not loaded within {self.timeout} s"
            time.sleep(0.02)
        self.settle()

    def _has_loaded(self, url):
        try:
            return self.evaluate(f"document.readyState === 'complete' && location.href === new URL({json.dumps(url)}).href")
        except RuntimeError:  # the page is being replaced
            return False

    def settle(self):
        """Waits for layout, painting and the handlers that follow them."""
        self.evaluate(
            "new Promise((done) => { let frames = 6;"
            "const next = () => --frames ? requestAnimationFrame(next) : setTimeout(done, 50); next(); })"
        )

    def evaluate(self, expression):
        """Returns the value of an expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def press(self, key, shift=False):
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0, **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    def point(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path, full_page=False):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
