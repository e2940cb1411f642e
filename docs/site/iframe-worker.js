// The search is a Worker, and browsers start none from a file. Where the site is read from files, a
// hidden frame runs it. The plugin `offline` fetches such a script from a network unless one of this
// name is given.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.document.open()
      this.inside.document.write("<body></body>")
      this.inside.document.close()
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = this.load(url)
    }

    load(url) {
      const script = this.inside.document.createElement("script")
      script.src = url
      return new Promise((done, failed) => {
        script.onload = done
        script.onerror = failed
        this.inside.document.body.append(script)
      })
    }

    async postMessage(data) {
      await this.ready
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
