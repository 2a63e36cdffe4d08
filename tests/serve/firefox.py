"""Firefox without a window, driven by Marionette: its own protocol, JSON over a socket."""

import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import closing

FIREFOX = os.environ.get("FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox")
PREFERENCES = {
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "app.update.disabledForTesting": True,
    "browser.startup.homepage_override.mstone": "ignore",
    "network.proxy.type": 1,  # of a proxy that is not there: nothing is reached
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
}


class Firefox:
    """A running Firefox: `with Firefox(folder) as page`, then `open` and `run`."""

    def __init__(self, folder, width=1280, height=900):
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.profile, self.size, self.asked = folder / "profile", (width, height), 0
        self.profile.mkdir()
        preferences = PREFERENCES | {"marionette.port": self.port}
        lines = (f"user_pref({json.dumps(n)}, {json.dumps(x)});\n" for n, x in preferences.items())
        (self.profile / "user.js").write_text("".join(lines))

    def __enter__(self):
        width, height = self.size
        command = [FIREFOX, "--headless", "--marionette", "--no-remote", "--profile"]
        command += [str(self.profile), f"--width={width}", f"--height={height}"]
        environment = os.environ | {"HOME": str(self.profile), "MOZ_HEADLESS_WIDTH": str(width)}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(600):
            self.socket = socket.socket()
            self.socket.settimeout(120)
            if not self.socket.connect_ex(("127.0.0.1", self.port)):
                break
            self.socket.close()
            time.sleep(0.1)
        self.stream = self.socket.makefile("rb")
        self.read()  # its greeting
        self.ask(
            "WebDriver:NewSession", capabilities={"alwaysMatch": {"pageLoadStrategy": "eager"}}
        )
        self.ask("WebDriver:SetTimeouts", script=60_000)
        self.ask("WebDriver:SetWindowRect", width=width, height=height)
        return self

    def __exit__(self, *_):
        self.ask("Marionette:Quit", flags=["eForceQuit"])
        self.process.wait(30)
        self.stream.close()
        self.socket.close()

    def read(self):
        length = b""
        while (byte := self.stream.read(1)) != b":":
            length += byte
        return json.loads(self.stream.read(int(length)))

    def ask(self, command, **parameters):
        self.asked += 1
        text = json.dumps([0, self.asked, command, parameters]).encode()
        self.socket.sendall(b"%d:%s" % (len(text), text))
        _, _, error, result = self.read()
        assert error is None, error
        return result

    def open(self, address):
        """Go to a page; wait until its document is there."""
        self.ask("WebDriver:Navigate", url="about:blank")
        self.ask("WebDriver:Navigate", url=address)

    def run(self, function):
        """The result of an async function of JavaScript, given as text, in the page."""
        script = f"const done = arguments[0]; ({function})().then(done, (e) => done('ERROR ' + e));"
        value = self.ask("WebDriver:ExecuteAsyncScript", script=script, args=[])["value"]
        assert not str(value).startswith("ERROR"), value
        return value
