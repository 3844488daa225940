"""A CA of one's own, and a server's certificate that it has signed."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def own_authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Return the CA's certificate, and what a server on the loopback address needs that it knows.

    Skips the test if there is no openssl.
    """
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    # Python 3.13 takes no CA, and openssl makes every certificate one, that does not say what its key is for.
    may_sign, no_ca = ("-addext", "keyUsage=critical,keyCertSign"), ("-addext", "basicConstraints=critical,CA:FALSE")
    openssl("req", "-x509", *key, *may_sign, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=a CA of our own")
    signed = (*no_ca, "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl("req", "-x509", *key, *signed, "-keyout", "key.pem", "-out", "server.pem", "-subj", "/CN=server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "key.pem")
    return folder / "ca.pem", context
