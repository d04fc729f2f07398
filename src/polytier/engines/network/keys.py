"""Keys and certificates: an authority of the federation, certificates with the names of nodes, revocation.

FOLDER/ca.key.pem, ca.pem    the authority; the key stays with whoever enrols nodes
FOLDER/issued.txt            serial number and name of every certificate, one per line
FOLDER/revoked.txt           serial numbers of certificates that are no longer valid, one per line
FOLDER/NODE/                 key.pem, cert.pem, ca.pem: what the node NODE needs, in which / is written as -
"""

from __future__ import annotations

import datetime
import logging
import os
import ssl
from pathlib import Path
from typing import Any

from polytier._errors import missing
from polytier._terminal import event
from polytier.files.read import version

log = logging.getLogger("polytier")
CA_KEY, CA, KEY, CERTIFICATE = "ca.key.pem", "ca.pem", "key.pem", "cert.pem"
ISSUED, REVOKED = "issued.txt", "revoked.txt"
CA_DAYS, DAYS = 3650, 398
SERVER = "server"


def crypto() -> Any:
    """The modules of `cryptography` that are needed."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise missing("network") from None
    return x509, hashes, serialization, ec, NameOID


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; it must not exist."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{path} exists already; remove it first if it is to be replaced") from None
    with os.fdopen(file, "wb") as out:
        out.write(data)


def make_authority(folder: Path) -> None:
    """Make the authority of a federation in a folder.

    Raises:
        ValueError: There is one already.
    """
    _, _, serialization, ec, _ = crypto()
    if (folder / CA_KEY).exists():
        raise ValueError(f"{folder} has an authority already; enrol nodes with `polytier federation enrol NAME`")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = signed(key.public_key(), "polytier federation", key, None, CA_DAYS)
    write_private(folder / CA_KEY, private(key))
    (folder / CA).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / REVOKED).touch()


def enrol(folder: Path, name: str) -> Path:
    """Make key and certificate of a node.

    Args:
        folder: Of the authority.
        name: The node's address, such as "device/ann", "team/north" or "server".

    Returns:
        The folder to carry to the node.
    """
    *_, ec, _ = crypto()
    key, place = ec.generate_private_key(ec.SECP256R1()), folder / name.replace("/", "-")
    authority(folder)
    place.mkdir(mode=0o700, exist_ok=True)
    write_private(place / KEY, private(key))
    certify(folder, key.public_key(), name, place / CERTIFICATE)
    (place / CA).write_bytes((folder / CA).read_bytes())
    return place


def renew(folder: Path, name: str) -> Path:
    """Make a new certificate for the key of a node that was enrolled here.

    Returns:
        The certificate, a file to carry to the node.

    Raises:
        ValueError: The node has no key here.
    """
    _, _, serialization, _, _ = crypto()
    place = folder / name.replace("/", "-")
    if not (place / KEY).exists():
        raise ValueError(f"{place} has no {KEY}; sign the request of a node whose key is elsewhere once more")
    key = serialization.load_pem_private_key((place / KEY).read_bytes(), None)
    certify(folder, key.public_key(), name, place / CERTIFICATE)
    return place / CERTIFICATE


def certify(folder: Path, public: Any, name: str, out: Path) -> None:
    """Write a certificate, and note it in the list of the authority."""
    _, _, serialization, _, _ = crypto()
    certificate = signed(public, name, *authority(folder), DAYS)
    with (folder / ISSUED).open("a") as issued:
        issued.write(f"{certificate.serial_number:x} {name}\n")
    replace_file(out, certificate.public_bytes(serialization.Encoding.PEM))


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that other programs read meanwhile."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def make_request(folder: Path, name: str) -> Path:
    """Make a key and a request for a certificate; the key stays on this machine.

    Returns:
        The request, a file to send to the authority.
    """
    x509, hashes, serialization, ec, NameOID = crypto()
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(folder / KEY, private(key))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    path = folder / f"{name.replace('/', '-')}.csr"
    path.write_bytes(request.public_bytes(serialization.Encoding.PEM))
    return path


def sign_request(folder: Path, path: Path) -> tuple[str, Path]:
    """Sign a request.

    Returns:
        The name in it, and the certificate, a file beside the request.

    Raises:
        ValueError: The file is no valid request.
    """
    x509, _, _, _, NameOID = crypto()
    try:
        request = x509.load_pem_x509_csr(path.read_bytes())
        (name,) = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if not request.is_signature_valid:
            raise ValueError("its signature is wrong")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no request for a certificate: {error}") from None
    out = path.with_suffix(".crt")
    certify(folder, request.public_key(), name.value, out)
    return name.value, out


def revoke(folder: Path, name: str) -> list[int]:
    """Note that the certificates of a node are no longer valid; returns their serial numbers.

    The list is copied to the folders of nodes that are here.

    Raises:
        ValueError: The node has no certificate of this authority.
    """
    serials = issued(folder, name)
    if not serials:
        raise ValueError(f"{folder / ISSUED} has no {name}; give the name of a node that was enrolled here")
    text = "".join(f"{number:x}\n" for number in sorted({*revoked(folder / REVOKED), *serials}))
    for place in (folder, *(path.parent for path in folder.glob(f"*/{KEY}"))):
        replace_file(place / REVOKED, text.encode())
    return serials


def issued(folder: Path, name: str) -> list[int]:
    """The serial numbers of all certificates of a node, which may have been renewed."""
    x509, *_ = crypto()
    lines = (folder / ISSUED).read_text().splitlines() if (folder / ISSUED).exists() else []
    found = {int(serial, 16) for serial, _, whose in (line.partition(" ") for line in lines) if whose == name}
    path = folder / name.replace("/", "-") / CERTIFICATE  # an authority of an earlier version has no list
    if path.exists():
        found.add(x509.load_pem_x509_certificate(path.read_bytes()).serial_number)
    return sorted(found)


def revoked(path: Path) -> set[int]:
    """The serial numbers in a list of revoked certificates; none if there is no list."""
    return {int(line, 16) for line in path.read_text().split()} if path.exists() else set()


class Revocations:
    """The list of revoked certificates in the folder of a node; it is read again when it changes.

    Args:
        keys: The folder.
    """

    def __init__(self, keys: Path) -> None:
        self._path, self._seen, self._serials = keys / REVOKED, None, set()

    def __contains__(self, serial: int) -> bool:
        now = version(self._path)
        if now != self._seen:
            self._seen, self._serials = now, revoked(self._path)
        return serial in self._serials


def private(key: Any) -> bytes:
    """A private key as text."""
    _, _, serialization, _, _ = crypto()
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def authority(folder: Path) -> tuple[Any, Any]:
    """Key and certificate of the authority in a folder."""
    x509, _, serialization, _, _ = crypto()
    if not (folder / CA_KEY).exists():
        raise ValueError(f"{folder} has no authority; make one with `polytier federation ca`")
    key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    return key, x509.load_pem_x509_certificate((folder / CA).read_bytes())


def signed(public: Any, name: str, key: Any, issuer: Any, days: int) -> Any:
    """A certificate; of the authority itself if there is no issuer."""
    x509, hashes, _, _, NameOID = crypto()
    if not 1 <= len(name) <= 64:
        raise ValueError(f"a name in a certificate has 1 to 64 characters; got {name!r}")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    start = x509.CertificateBuilder().subject_name(subject).public_key(public)
    start = start.issuer_name(subject if issuer is None else issuer.subject)
    start = start.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(minutes=5))
    start = start.not_valid_after(now + datetime.timedelta(days=days))
    start = start.add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= dict.fromkeys(("encipher_only", "decipher_only"), False)
    usage |= {"digital_signature": issuer is not None, "key_cert_sign": issuer is None, "crl_sign": issuer is None}
    start = start.add_extension(x509.KeyUsage(**usage), critical=True)
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(public if issuer is None else issuer.public_key())
    return start.add_extension(own, critical=False).add_extension(above, critical=False).sign(key, hashes.SHA256())


def certificate_name(keys: Path) -> str:
    """The name in a node's own certificate.

    Raises:
        ValueError: There is none.
    """
    x509, _, _, _, NameOID = crypto()
    try:
        certificate = x509.load_pem_x509_certificate((keys / CERTIFICATE).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{keys} has no certificate ({error}); make one with `polytier federation enrol NAME`, and give its folder"
        ) from None
    return certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value


# -- TLS ----------------------------------------------------------------------------------------------


class Renewed(ssl.SSLContext):
    """Settings of TLS that follow the files they were read from: new links show the newest certificate."""

    folder: Path
    seen: tuple[Any, ...]

    def read(self, folder: Path) -> None:
        """Read key, certificate and authority."""
        self.folder, self.seen = folder, self._versions(folder)
        self.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        self.load_verify_locations(folder / CA)

    def wrap_bio(self, *args: Any, **settings: Any) -> ssl.SSLObject:
        """Begin a link."""
        if self._versions(self.folder) != self.seen:
            try:
                self.read(self.folder)
            except (OSError, ssl.SSLError) as error:
                log.warning("the keys in %s cannot be read (%s); those read before are used", self.folder, error)
        return super().wrap_bio(*args, **settings)

    def _versions(self, folder: Path) -> tuple[Any, ...]:
        return tuple(version(folder / name) for name in (KEY, CERTIFICATE, CA))


class LoggedHandshake(ssl.SSLObject):
    """A link that is accepted; a handshake that fails is one line in the log."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError as error:
            reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error
            log.warning("a link was refused: %s", reason, extra=event("refused"))
            raise


def tls(folder: Path, listens: bool) -> ssl.SSLContext:
    """The settings of TLS of a node: both sides show a certificate of the same authority.

    Args:
        folder: With key.pem, cert.pem and ca.pem.
        listens: Whether this side accepts links.

    Raises:
        ValueError: A file is missing or cannot be read.
    """
    context = Renewed(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    if listens:
        context.sslobject_class = LoggedHandshake
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names of nodes are checked instead, against the roster
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.read(folder)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"{folder} needs {KEY}, {CERTIFICATE} and {CA} ({error}); make them with `polytier federation enrol NAME`"
        ) from None
    return context


def peer(socket: Any) -> tuple[str, int]:
    """The name and the serial number in the certificate of the other side of a link; "" and 0 if it is closed.

    Args:
        socket: A socket or an object of TLS.
    """
    try:
        certificate = socket.getpeercert() or {}
    except (OSError, ValueError, AttributeError):
        certificate = {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return (names[0] if len(names) == 1 else ""), int(certificate.get("serialNumber", "0"), 16)
