#!/bin/sh
# Installs headless Chromium into the folder $1 for tests/e2e/test_browser.py, where the machine has no browser.
# Nobody needs to be root: the npm package (68 MB) is made for bare servers and brings what Chromium links to.
set -eu
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null; then exit; fi
done
if [ -x "$1/run" ]; then exit; fi
if ! command -v npm >/dev/null || ! command -v node >/dev/null; then
    echo "No browser, and no npm to get one from: the browser test will be skipped" >&2
    exit
fi

echo "Installing headless Chromium for a test (68 MB)"
mkdir -p "$1.new"
cd "$1.new"
if ! npm pack --silent @sparticuz/chromium@147.0.0 >/dev/null; then
    echo "npm cannot be reached: the browser test will be skipped" >&2
    exit
fi
tar xzf sparticuz-chromium-*.tgz --strip-components=2 package/bin
rm sparticuz-chromium-*.tgz
node -e '
const { brotliDecompressSync } = require("zlib"), fs = require("fs");
for (const name of ["chromium.br", "al2023.tar.br", "fonts.tar.br"])
    fs.writeFileSync(name.slice(0, -3), brotliDecompressSync(fs.readFileSync(name)));'
tar xf al2023.tar
tar xf fonts.tar
rm ./*.br ./*.tar
# Its own names /tmp. Without any font Chromium ends.
cat >fonts.conf <<'END'
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><dir>/usr/share/fonts</dir></fontconfig>
END
cat >run <<'END'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$here/lib" FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/chromium" "$@"
END
chmod +x chromium run
cd - >/dev/null
rm -rf "$1"
mv "$1.new" "$1"
