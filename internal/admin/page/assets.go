package page

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"
)

// An asset is a file that pages refer to by its sum, so that browsers may keep it.
type asset struct {
	body      []byte
	mediaType string
	sum       string
}

func readAssets(files fs.FS) (map[string]asset, error) {
	all := map[string]asset{}
	err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		body, err := fs.ReadFile(files, name)
		if err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		kind := mime.TypeByExtension(path.Ext(name))
		switch path.Ext(name) { // the host's table of types may say anything
		case ".js":
			kind = "text/javascript; charset=utf-8"
		case ".css":
			kind = "text/css; charset=utf-8"
		case ".svg":
			kind = "image/svg+xml"
		case ".LICENSE", ".md":
			kind = "text/plain; charset=utf-8"
		}
		sum := sha256.Sum256(body)
		all[name] = asset{body, kind, hex.EncodeToString(sum[:6])}
		return nil
	})
	return all, err
}

func (p *Page) static(w http.ResponseWriter, r *http.Request) {
	file, known := p.assets[r.PathValue("file")]
	if !known {
		p.Refuse(w, r, http.StatusNotFound, "There is nothing here", "The address may be mistyped.")
		return
	}
	if r.URL.Query().Get("v") == file.sum {
		w.Header().Set("Cache-Control", "private, max-age=31536000, immutable")
	}
	w.Header().Set("Content-Type", file.mediaType)
	_, _ = w.Write(file.body)
}
