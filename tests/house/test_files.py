"""Files are written whole or not at all, whatever interrupts the write."""

import concurrent.futures
import errno
import stat

import pytest

from optax_boost._foundation import _files


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path):
  path = tmp_path / "a.bin"
  path.write_bytes(b"old")

  def fill_the_disk(file):
    file.write(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")

  with pytest.raises(OSError, match=r"No space left on device: '.*a\.bin'") as error:
    _files.write_atomically(path, fill_the_disk)
  assert error.value.errno == errno.ENOSPC

  def fail(file):
    raise OSError("25 requested and 7 written")

  with pytest.raises(OSError, match=r"can't be written: 25 requested and 7 written: '.*a\.bin'"):
    _files.write_atomically(path, fail)
  assert path.read_bytes() == b"old"
  assert names(tmp_path) == ["a.bin"]


def test_the_new_contents_appear_all_at_once_with_the_old_permissions(tmp_path):
  path, plain = tmp_path / "a.bin", tmp_path / "plain"
  plain.write_bytes(b"")

  def write(file):
    file.write(b"new")
    file.flush()
    assert not path.exists() or path.read_bytes() == b"new"

  _files.write_atomically(path, write)
  assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
  path.chmod(0o640)
  _files.write_atomically(path, write)
  assert stat.S_IMODE(path.stat().st_mode) == 0o640
  assert path.read_bytes() == b"new"
  assert names(tmp_path) == ["a.bin", "plain"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_one(tmp_path, exists):
  (tmp_path / "data").mkdir()
  target, link = tmp_path / "data" / "a.bin", tmp_path / "link"
  if exists:
    target.write_bytes(b"old")
  link.symlink_to(target)
  _files.write_atomically(link, lambda file: file.write(b"new"))
  assert link.is_symlink()
  assert target.read_bytes() == b"new"
  assert names(tmp_path) == ["data", "link"]


def test_threads_that_write_one_file_do_not_tear_it(tmp_path):
  path = tmp_path / "a.bin"

  def write(number):
    contents = bytes([number]) * 10_000
    for _ in range(20):
      _files.write_atomically(path, lambda file: file.write(contents))
      found = path.read_bytes()
      assert found == found[:1] * 10_000

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(write, range(4)))
  assert names(tmp_path) == ["a.bin"]


def test_refuses_a_folder_and_a_path_in_no_folder(tmp_path):
  with pytest.raises(IsADirectoryError, match=str(tmp_path)):
    _files.write_atomically(tmp_path, lambda file: None)
  with pytest.raises(FileNotFoundError, match=r"nowhere/a'"):
    _files.write_atomically(tmp_path / "nowhere" / "a", lambda file: None)
