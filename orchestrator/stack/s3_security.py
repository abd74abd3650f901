"""Certificate and keys of a SeaweedFS server, which keep others out.

``python -m orchestrator.stack.s3_security DIRECTORY`` makes them for a server that a container
runs in that directory (infra/compose, infra/kubernetes).
"""

from __future__ import annotations

import secrets
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from orchestrator.stack.description import LOOPBACK
from orchestrator.storage.files import write_private

_SECURITY_FILE = "security.toml"  # read from the directory that the server runs in
_CERTIFICATE_FILE, _CERTIFICATE_KEY_FILE = "server.crt", "server.key"
_CERTIFICATE_DAYS = 36_500  # it ends with its directory
_PARTS = ("master", "volume", "filer", "s3", "admin", "worker", "client", "msg_broker", "msg_agent", "mq")
_HTTP_PARTS = ("master", "volume", "filer", "admin")


def ensure_security(directory: Path, address: str) -> None:
    """Keys and certificates, made once per directory, without which the server's own ports refuse.

    The servers behind S3 do not check its signatures: a client of one of them could read and write everything.
    Requests over HTTP need a token of the four keys, and calls over gRPC, which hand such tokens out, the certificate:
    the server's parts call each other with the very one that they show.
    """
    path = directory / _SECURITY_FILE
    if path.exists() and f'"{directory / _CERTIFICATE_FILE}"' in path.read_text(encoding="utf-8"):
        return  # a directory that was moved gets new ones: without its certificate the server opens those ports
    _write_certificate(directory, address)
    jwt = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing", "jwt.filer_signing.read")
    pair = f'cert = "{directory / _CERTIFICATE_FILE}"\nkey = "{directory / _CERTIFICATE_KEY_FILE}"\n'
    sections = [f'[{name}]\nkey = "{secrets.token_hex(32)}"\nexpires_after_seconds = 60\n' for name in jwt]
    authority = f'ca = "{directory / _CERTIFICATE_FILE}"\n'
    sections += [f"[grpc]\n{authority}"]
    sections += [f"[grpc.{part}]\n{pair}" for part in _PARTS]
    sections += [f"[https.{part}]\n{pair}{authority}" for part in _HTTP_PARTS]
    sections += [f"[https.client]\nenabled = true\n{pair}{authority}"]
    write_private(path, "\n".join(sections))


def _write_certificate(directory: Path, address: str) -> None:
    """A self-signed certificate, only for this server."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "orchestrator")])
    begins = datetime.now(UTC) - timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=_CERTIFICATE_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, lock = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_private(directory / _CERTIFICATE_KEY_FILE, key.private_bytes(pem, form, lock).decode())
    write_private(directory / _CERTIFICATE_FILE, certificate.public_bytes(pem).decode())


def main(arguments: list[str]) -> int:
    """Make certificate and keys of a server whose parts call each other on loopback, unless the directory has them."""
    directory = Path(arguments[0]).absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # an emptyDir of Kubernetes is root's
    ensure_security(directory, LOOPBACK)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
